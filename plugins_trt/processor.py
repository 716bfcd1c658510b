"""What this machine's processor computes well."""

from __future__ import annotations

import platform

import torch

IS_X86 = platform.machine() in ("x86_64", "AMD64")


def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies matrices of bfloat16 by instructions for it: AVX-512 BF16, which AMX comes with, or
    Arm's BF16.

    Without, elements are converted one by one: with AVX2 a product of 512 rows takes six times as long as in float32.
    oneDNN's own answer also counts AVX-512 without BF16, where it converts, too.
    """
    if not torch._C._has_mkldnn:
        return False
    if IS_X86:
        return torch.cpu._is_avx512_bf16_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
