"""Compile Triton kernels ahead of time, with no GPU, and learn what they need of one.

The cubin comes from Triton; what registers it uses and what it spills only the assembler says, so the PTX goes
through it once more with `-v`. Triton's wheel carries the assembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ..errors import BuildError
from .architectures import ARCHITECTURES


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One way to compile a kernel. An operator's `<op>_triton.py` lists those that the report shows:

        def report_variants() -> Iterable[KernelVariant]

    `signature` has the type of every parameter that is not in `constants`, in the form of `compile_kernel`. The report
    fails when a hot variant spills; `is_quick` variants are those that a quick report compiles.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int
    is_hot: bool = True
    is_quick: bool = False
    architectures: tuple[int, ...] = ARCHITECTURES

    def compile(self, arch: int) -> CompiledKernel:
        return compile_kernel(
            self.kernel,
            self.signature,
            self.constants,
            arch=arch,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel's machine code and needs.

    `parameters` are names and types in the order of the launch. Triton's launch convention adds two pointers after
    them (global and profiling scratch memory), null here: kernels that need scratch memory are refused.
    `shared_bytes` is dynamic shared memory, to be requested at launch (beyond 48 KiB by opting in).
    """

    name: str
    arch: int
    cubin: bytes
    parameters: tuple[tuple[str, str], ...]
    num_warps: int
    registers: int  # per thread
    shared_bytes: int
    spill_store_bytes: int  # per thread
    spill_load_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes + self.spill_load_bytes > 0


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    arch: int,
    num_warps: int,
    num_stages: int,
) -> CompiledKernel:
    """Compile for compute capability `arch / 10`.

    `signature`: Triton's type of each parameter that is not a constant, `*fp16`, `i32`, `fp32`, with `:16` behind it
    where the caller promises that the pointer or number is divisible by 16 (vector loads need it). `constants`: values
    of `tl.constexpr` parameters, and None for optional pointers. Raises `BuildError` naming the parameter that is
    missing or unknown, or with the compiler's words.
    """
    if not isinstance(kernel, JITFunction):
        raise BuildError("kernels cannot be compiled while TRITON_INTERPRET is set: unset it")
    names = list(kernel.arg_names)
    given = {*signature, *constants}
    if given != set(names):
        wrong = sorted(given.symmetric_difference(names))
        raise BuildError(f"{kernel.__name__}: missing or unknown parameters: {', '.join(wrong)}")
    types = {name: signature[name].split(":")[0] if name in signature else "constexpr" for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, type in signature.items()
        if type.endswith(":16")
    }
    source = ASTSource(kernel, types, constexprs=dict(constants), attrs=attributes)
    target = GPUTarget("cuda", arch, 32)
    try:
        compiled = triton.compile(
            source, target=target, options={"num_warps": num_warps, "num_stages": num_stages}
        )
    except Exception as error:  # the compiler's passes raise anything
        raise BuildError(f"{kernel.__name__} does not compile for sm_{arch}: {error}") from error
    metadata = compiled.metadata
    if metadata.global_scratch_size:
        raise BuildError(
            f"{kernel.__name__} needs global scratch memory on sm_{arch}, which no caller provides"
        )
    registers, spill_stores, spill_loads = _assemble_verbosely(compiled.asm["ptx"], arch)
    return CompiledKernel(
        name=metadata.name,
        arch=arch,
        cubin=compiled.asm["cubin"],
        parameters=tuple((name, types[name]) for name in names if name in signature),
        num_warps=metadata.num_warps,
        registers=registers,
        shared_bytes=metadata.shared,
        spill_store_bytes=spill_stores,
        spill_load_bytes=spill_loads,
    )


def _assemble_verbosely(ptx: str, arch: int) -> tuple[int, int, int]:
    """Registers, bytes of spill stores and of spill loads, assembled as Triton does."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(ptx)
        gpu = f"--gpu-name={sm_arch_from_capability(arch)}"
        command = [get_ptxas(arch).path, "-lineinfo", "-v", "--regAllocOptLevel=2", gpu, str(path)]
        log = subprocess.run(
            [*command, "-o", str(path.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        ).stderr
    numbers = [
        re.search(pattern, log)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    ]
    if None in numbers:
        raise BuildError(f"the assembler's report cannot be read:\n{log}")
    registers, stores, loads = (int(match[1]) for match in numbers if match)
    return registers, stores, loads
