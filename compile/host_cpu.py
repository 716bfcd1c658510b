"""What this machine's processor computes well."""

from __future__ import annotations

import torch


def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies matrices of bfloat16 here: with AMX, AVX-512 or Arm's instructions for it.

    Without, PyTorch falls back to loops that convert each element: a product of 512 rows takes six times as long as in
    float32, and Inductor's are slower too, but for single rows.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
