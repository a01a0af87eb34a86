"""Shared libraries made of object files, against what the system's linker makes of them."""

import ctypes
import shutil
import subprocess

import pytest

from tilewise.sm90 import cache, link

NEEDED = (cache.RUNTIME, "libtvm_ffi.so")
SYMBOL = f"__tvm_ffi_{cache.FUNCTION}"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to compare with")

PROGRAM = """
    #include <stdlib.h>
    static int counter;                      /* zeros */
    static const char *words[] = {"zero", "one"};    /* absolute addresses in writable data */
    int shared = 40;
    static int twice(int x) { return 2 * x; }
    static int (*volatile function)(int) = twice;
    int answer(int x) { counter += function(x); return counter + shared + atoi("2") + (words[1][0] == 'o'); }
    int hidden(void) { return counter; }
"""


def compile_c(text, tmp_path, *options):
    (tmp_path / "program.c").write_text(text)
    command = ["cc", "-O1", "-c", "-fPIC", "-fno-plt", "-fno-asynchronous-unwind-tables", *options]
    subprocess.run([*command, "program.c", "-o", "program.o"], cwd=tmp_path, check=True)
    return (tmp_path / "program.o").read_bytes()


@needs_cc
def test_a_linked_program_runs(tmp_path):
    content = link.shared_library(compile_c(PROGRAM, tmp_path, "-mcmodel=large"), lambda name: name == "answer", ["libc.so.6"])
    (tmp_path / "program.so").write_bytes(content)
    library = ctypes.CDLL(str(tmp_path / "program.so"))
    assert [library.answer(x) for x in (1, 10, 100)] == [45, 65, 265]
    with pytest.raises(AttributeError):
        _ = library.hidden


@needs_cc
@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("int f(void); int g(void) { return f(); }", ["-mcmodel=small"], "relocations"),
        ("static int x; int *g(void) { return &x; }", ["-mcmodel=large", "-fno-pic"], "an absolute address where the loader cannot write"),
        ("extern int x; int *g = &x;", ["-mcmodel=large"], "nothing says where x is"),
        ("static void f(void) {} __attribute__((constructor)) void g(void) { f(); }", ["-mcmodel=large"], "sections of the types"),
        ("int g2(void) { return 1; }", ["-mcmodel=large"], "nothing that is to be exported"),
    ],
)
def test_what_is_not_linked_is_refused(text, options, sentence, tmp_path):
    with pytest.raises(link.NotLinkable, match=sentence):
        link.shared_library(compile_c(text, tmp_path, *options), lambda name: name == "g", [])


def test_no_object(tmp_path):
    for content in (b"", b"#!/bin/sh\n", b"\x7fELF\2\1\1" + bytes(57)):
        with pytest.raises(link.NotLinkable):
            link.shared_library(content, lambda name: True, [])


def test_a_kernel_cut_short_is_refused(exported):
    whole = exported.path.read_bytes()
    assert len(link.shared_library(whole, lambda name: name == SYMBOL, NEEDED)) > 10_000
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        with pytest.raises(link.NotLinkable, match="cut short"):
            link.shared_library(whole[: int(share * len(whole))], lambda name: name == SYMBOL, NEEDED)


@needs_cc
def test_a_kernel_is_as_the_systems_linker_makes_it(exported, tmp_path):
    """What the two functions say to calls without a GPU, of which most comes from the kernel's read-only data, by way of its relocations."""
    import tvm_ffi

    (tmp_path / "ours.so").write_bytes(link.shared_library(exported.path.read_bytes(), lambda name: name == SYMBOL, NEEDED))
    runtime = ctypes.CDLL(str(cache.library()))
    assert runtime
    libraries = [str(cache.library()), tvm_ffi.libinfo.find_libtvm_ffi()]
    subprocess.run(["cc", "-shared", "-nostdlib", str(exported.path), *libraries, "-o", str(tmp_path / "theirs.so")], check=True)
    ours, theirs = (tvm_ffi.load_module(tmp_path / name)[cache.FUNCTION] for name in ("ours.so", "theirs.so"))
    import torch

    q, lse = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64)
    for arguments in ((), (1,), (q, q, q, q, lse, *range(6), 1.0), (None,) * 12, (q.float(), q, q, q, lse, *range(6), 1.0), (q,) * 12):
        said = []
        for function in (ours, theirs):
            with pytest.raises((TypeError, ValueError)) as error:
                function(*arguments)
            said.append(str(error.value))
        assert said[0] == said[1] and "launch(tensors" in said[0]
