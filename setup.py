"""Build the optional extension ``hdet_kernels._native``; everything else is in pyproject.toml.

Environment variables:
    HDET_NATIVE=0: build pure Python, without the extension.
    HDET_CUDA=1: fail if the CUDA part cannot be built. 0: leave it out. Default: build it if possible.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# One binary serves torch 2.10 and later: only that version of torch's stable ABI is used.
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
# Products and sums are rounded separately, never contracted into fused multiply-adds. The compiler would choose which
# ones to contract for each kernel, and an update rule would give different bits for different storage formats.
CXX_FLAGS = ["-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden"]
CXX_FLAGS += ["-g0"]  # extensions inherit Python's flags; debug symbols would make the binary ten times as large
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-DUSE_CUDA"]


def say(message: str) -> None:
    print(f"hdet_kernels: {message}", file=sys.stderr, flush=True)


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """Return (major, minor) of a CUDA compiler, or None if it does not say."""
    found = re.search(
        r"release (\d+)\.(\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    )
    return (int(found[1]), int(found[2])) if found else None


def why_no_cuda(nvcc: str | None, torch_cuda: str | None) -> str | None:
    """Return why the CUDA part cannot be built, or None if it can."""
    if os.environ.get("HDET_CUDA") == "0":
        return "HDET_CUDA=0"
    if torch_cuda is None:
        return "the installed torch has no CUDA; install a CUDA build of torch"
    if nvcc is None:
        return "there is no nvcc; install the CUDA toolkit and put nvcc on PATH or set CUDA_HOME"
    version = nvcc_version(nvcc)
    if version is None or version[0] != int(torch_cuda.split(".")[0]):
        return f"{nvcc} is of CUDA {version}, torch of CUDA {torch_cuda}; their major versions must be equal"
    return None


def extension() -> dict[str, object]:
    """Return the arguments of setup() that build the extension; none for a pure build."""
    if os.environ.get("HDET_NATIVE") == "0":
        say("HDET_NATIVE=0: building pure Python")
        return {}
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        say(
            f"no C++ compiler ({compiler}): building pure Python. Set CXX to a compiler for the fast CPU and CUDA steps"
        )
        return {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(
            f"hdet_kernels: torch cannot be imported ({error}), and the extension is built against it. Install torch, "
            "then: pip install --no-build-isolation . (or set HDET_NATIVE=0 for pure Python)"
        ) from error

    home = cpp_extension.CUDA_HOME
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    missing = why_no_cuda(nvcc, torch.version.cuda)
    if missing is not None and os.environ.get("HDET_CUDA") == "1":
        raise SystemExit(f"hdet_kernels: HDET_CUDA=1, but the CUDA part cannot be built: {missing}")
    say("building with CUDA" if missing is None else f"building for the CPU alone: {missing}")
    patterns = ["*.cpp", "*.cu"] if missing is None else ["*.cpp"]
    sources = sorted(str(source.relative_to(ROOT)) for pattern in patterns for source in (ROOT / "csrc").glob(pattern))
    if nvcc is not None and missing is None:
        # Independent of the GPU of this machine: all data-centre generations, and PTX for later ones.
        blackwell = (nvcc_version(nvcc) or (0, 0)) >= (12, 8)
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX" if blackwell else "8.0;9.0+PTX")
    make = cpp_extension.CUDAExtension if missing is None else cpp_extension.CppExtension
    native = make(
        "hdet_kernels._native",
        sources,
        depends=[str(header.relative_to(ROOT)) for header in sorted((ROOT / "csrc").glob("*.h"))],
        define_macros=[("HDET_WITH_CUDA", None)] if missing is None else [],
        extra_compile_args={"cxx": CXX_FLAGS + DEFINES, "nvcc": NVCC_FLAGS + DEFINES},
        py_limited_api=True,
    )
    build = cpp_extension.BuildExtension.with_options(use_ninja=cpp_extension.is_ninja_available())
    return {
        "ext_modules": [native],
        "cmdclass": {"build_ext": build},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


setup(**extension())
