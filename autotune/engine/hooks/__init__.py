"""Hooks on an unmodified script: the engine's functions hung on its loaders, models, optimizers and backward passes.

    next(loader) ── model(batch) ── loss.backward() ── optimizer.step()
        data          forward          backward           optimizer       ──▶ one step: samples, losses, seconds

Nothing here draws a random number or changes an order. What a config does not change is not touched.
"""
