"""How far two tensors may lie apart and still be the same but for rounding."""

import torch
from torch import Tensor


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding at the tensors' precision."""
    if a.shape != b.shape:
        return False
    share = 1e-4 if {a.dtype, b.dtype} <= {torch.float32, torch.float64} else 3e-2
    return bool((a.float() - b.float()).abs().max() <= share * b.float().abs().max().clamp(min=1e-6))


def tolerance(tensor: Tensor) -> float:
    """Relative difference that rounding alone explains at the tensor's precision."""
    return 1e-4 if tensor.dtype in (torch.float32, torch.float64) else 5e-2
