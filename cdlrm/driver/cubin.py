"""From the text of a kernel to machine code: NVRTC, with the result kept on disk.

CuPy's `RawModule` is not used to compile: it adds `-ftz=true` behind whatever options it is given (its
issue 9576), which flushes subnormal numbers to zero, and then results differ from the CPU's.  CuPy's
binding of NVRTC is used directly; it needs no GPU.

Only the variants that are launched get compiled, each once for each architecture and version of NVRTC.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CompileError
from .sources import OPTIONS

log = logging.getLogger("cdlrm")


class Code(NamedTuple):
    """Machine code (or PTX, for an architecture newer than NVRTC) and the kernel's name in it."""

    symbol: str
    image: bytes


def cache_dir() -> Path:
    """Where compiled kernels are kept: $CDLRM_CACHE_DIR, else cdlrm/kernels in $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("CDLRM_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cdlrm" / "kernels"


def version(nvrtc: Any) -> str:
    """NVRTC's version, "13.0".  Raises CompileError where CuPy does not find NVRTC."""
    try:
        return "{}.{}".format(*nvrtc.getVersion())
    except (RuntimeError, OSError, ImportError) as error:
        raise CompileError(
            f"CuPy finds no NVRTC to compile the kernels with ({' '.join(str(error).split())}); install it: "
            "pip install 'cdlrm[cuda13]' (or cdlrm[cuda12], for a torch with CUDA 12)."
        ) from error


def architecture(nvrtc: Any, capability: int) -> tuple[str, bool]:
    """NVRTC's option for a compute capability (90 = 9.0), and whether it gives machine code (else PTX).

    Raises CompileError where this NVRTC has no architecture that the device runs.
    """
    known = [int(arch) for arch in nvrtc.getSupportedArchs() if int(arch) <= capability]
    if not known:
        least = min(int(arch) for arch in nvrtc.getSupportedArchs())
        raise CompileError(
            f"NVRTC {version(nvrtc)} compiles for compute capability {least / 10:.1f} and higher, and this device "
            f"has {capability / 10:.1f}; install the extra cuda12 and a torch for CUDA 12."
        )
    exact = max(known) == capability
    return f"--gpu-architecture={'sm' if exact else 'compute'}_{max(known)}", exact


def compile_code(nvrtc: Any, text: str, file: str, expression: str, capability: int) -> Code:
    """Compile `expression` (a kernel with its template arguments) of `text`, never looking at the disk.

    nvrtc: `cupy.cuda.nvrtc`.  Raises CompileError with NVRTC's log.
    """
    option, exact = architecture(nvrtc, capability)
    program = nvrtc.createProgram(text, file, (), ())
    try:
        nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(program, (*OPTIONS, option))
        image = nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)
        return Code(nvrtc.getLoweredName(program, expression), image)
    except nvrtc.NVRTCError as error:
        said = nvrtc.getProgramLog(program).strip()
        raise CompileError(
            f"kernel {expression} of {file} did not compile for compute capability {capability / 10:.1f} ({error}); "
            f"this is a mistake of cdlrm or of its installation, please report it with NVRTC's log:\n{said}",
            log=said,
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def load_code(nvrtc: Any, text: str, file: str, expression: str, capability: int) -> Code:
    """As `compile_code`, from the disk if it was compiled before; a disk that cannot be written costs time only."""
    key = "\0".join(map(str, (version(nvrtc), OPTIONS, architecture(nvrtc, capability), expression, file, text)))
    path = cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()}.kernel"
    try:
        found = _unpack(path.read_bytes())
    except OSError:
        found = None
    if found is None:
        found = compile_code(nvrtc, text, file, expression, capability)
        _keep(path, found)
    return found


def _pack(code: Code) -> bytes:
    body = code.symbol.encode() + b"\n" + code.image
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpack(data: bytes) -> Code | None:
    """What `_pack` made; None if the file is damaged."""
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    symbol, _, image = body.partition(b"\n")
    return Code(symbol.decode(), image)


def _keep(path: Path, code: Code) -> None:
    """Write in one piece: another process may read at the same moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_pack(code))
        os.replace(file.name, path)
    except OSError as error:
        log.warning(
            "compiled kernels cannot be kept in %s (%s), so every start compiles them anew; set CDLRM_CACHE_DIR.",
            path.parent, error,
        )  # fmt: skip
