"""What runs inside a rank: control, mesh, model, data, training loop, checkpoints."""
