"""The compiler is told what to keep before anything can import it, as it reads its environment once; and these tests want what it compiles."""

import os
import sys
import tempfile

from tilewise.hopper.compile import why_no_compiler

if not why_no_compiler() and "cutlass" not in sys.modules:
    _kept = tempfile.TemporaryDirectory(prefix="tilewise-compile-")  # lives as long as this module does
    os.environ.update(CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP="cubin", CUTE_DSL_DUMP_DIR=_kept.name, TILEWISE_CACHE="0")
