"""Who else hears of a run: Prometheus, TensorBoard, W&B and hooks, in sidecar processes."""
