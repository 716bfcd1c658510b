"""Facts about NVIDIA architectures that kernels are chosen by. An architecture is its compute capability times ten."""

from __future__ import annotations

import sys

from ..errors import BuildError

# Those for which every kernel must compile.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Stands for CPU tensors under Triton's interpreter: no instructions and no limits of any hardware.
INTERPRETER = 0
# The first with instructions that convert float8_e4m3fn.
FIRST_FLOAT8_ARCHITECTURE = 89
# Shared memory that a block can opt in to, in KiB: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
_SHARED_KIB = {
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}


def shared_memory_limit(arch: int) -> int:
    """Bytes of shared memory that a block can have. Raises `BuildError` for an architecture not known here."""
    if arch == INTERPRETER:
        return sys.maxsize
    if arch not in _SHARED_KIB:
        raise BuildError(
            f"compute capability {arch / 10:.1f} is not supported: known are {sorted(_SHARED_KIB)}"
        )
    return _SHARED_KIB[arch] * 1024
