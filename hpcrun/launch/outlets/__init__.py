"""Who else is told of a run: Prometheus, TensorBoard, W&B, hooks."""
