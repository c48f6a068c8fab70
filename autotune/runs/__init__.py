"""What a trial does inside its process: time a target, let it learn, record its gradients and its data."""
