"""The final training with the winner: checkpointed and resumable."""
