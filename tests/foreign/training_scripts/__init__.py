"""Public training scripts with small sizes, in their authors' style.

Each has `loss_fn`, `loss_args()`, and `script(half)` with its step in float32 or in half precision.
"""
