"""The command line: `tilewise demo | check | bench | explain | report | doctor | warmup | tune | run`. Commands import what is heavy."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tilewise.cli.codes import INTERRUPTED, UNREAD, UNUSABLE, USAGE

PLAIN = ("doctor", "explain", "run")
EXTRA, PRINTERS = "cli", ("rich", "matplotlib")  # what tables and pictures are made with, and the extra that installs it
THREADS_A_CORE = 8  # more than this is a slip; some libraries crash where they cannot start as many as were asked for

EXIT_CODES = """exit codes:
  0    done
  1    a check failed: a result is wrong, or two trainings disagree
  2    wrong usage, or a value that makes no sense
  3    this machine lacks what is needed: no usable backend, a missing package, a file that cannot be read or written
  130  interrupted (Ctrl-C)
  141  whatever read the output stopped reading, as in `tilewise doctor | head -1`"""

EXAMPLES = {
    "demo": """  tilewise demo                                  the whole demo, under 2 minutes on 2 cores
  tilewise demo --out report.html --steps 40     a shorter training
  tilewise demo --seqlens 512,1024,2048          a shorter sweep
  tilewise demo --serve                          a server in place of the training: paged cache, shared prefixes, speculative trees
  tilewise demo --ranks 2                        two processes share each sequence of the training: the losses of one, to the last bit""",
    "check": """  tilewise check                                 the quick grid on every backend of this machine
  tilewise check --full --backend tiled          the full grid on one backend
  tilewise check --case bf16                     the cases with bf16 in their names""",
    "bench": """  tilewise bench                                 a small sweep against torch's SDPA and the naive formula
  tilewise bench --seqlen 1024,4096 --heads 8/2 --mask causal,window:1023 --direction fwd+bwd
  tilewise bench --set models --dtype bf16 --out results.jsonl
  tilewise bench --set hard-inputs --data "q x64,outliers" --head-dim 64     inputs that make attention slow or wrong
  tilewise bench k1..k8 --seqlen 512 --head-dim 64 --causal 0 --check      rungs of the ladder, on a Hopper GPU
  tilewise bench k5,k6,sdpa:cudnn                the ladder's sweep
  tilewise bench --set models --only "Gemma*,gpt-oss*" --dtype bf16 --device cuda --ahead --direction fwd,bwd
  tilewise bench train --device cuda             steps of a GPT of 1.3B and 2.7B at 2k, 8k and 16k: tokens/s, MFU, memory
  tilewise bench --set decode --device cuda --only "b16 8k *"        new tokens against caches, plain and paged
  tilewise bench --list                          the names that --impl takes""",
    "explain": """  tilewise explain --seqlen 8192 --heads 32/8 --head-dim 128 --dtype bf16 --mask causal
  tilewise explain --seqlen 1x8192 --mask window:1023
  tilewise explain --seqlen 4096 --mask documents:1000:2000:1096
  tilewise explain --mask "Causal()&SlidingWindow(255,None)|FirstKeys(4)" """.rstrip(),
    "report": """  tilewise report                                rewrite the tables of README.md and docs/*.md, and the plots
  tilewise report results.jsonl --html bench.html
  tilewise report --docs README.md --plots plots/""",
    "doctor": """  tilewise doctor                                what is installed, and which backends are usable
  tilewise doctor --json""",
    "tune": """  tilewise tune --head-dim 128 --mask causal        the fastest kernel for a cell, on a Hopper GPU
  tilewise tune --dry-run                        the shapes for every cell, and what they take; needs no GPU
  tilewise tune --seqlen 1024,8192 --most 40 --out rows.jsonl
  tilewise tune --backend triton --head-dim 64,128    the fastest tiles of the Triton kernels, on any GPU
  tilewise tune --backend triton --precision int8,int8_qk    those of products in int8""",
    "warmup": """  tilewise warmup                                compile every kernel that ships for Hopper GPUs
  tilewise warmup --head-dim 128 --dtype bf16 --mask full,causal
  tilewise warmup --forward --mask documents:1:1,prefix:1 --extras softcap
  tilewise warmup --set models --dtype bf16      the kernels that a set of bench runs
  tilewise warmup --backend triton --arch sm_89  kernels of the Triton backend, in Triton's cache
  tilewise warmup --head-dim 128 --precision int8    kernels of attention(precision="int8") too
  tilewise warmup --clear                        remove what was compiled""",
    "run": """  tilewise run -- python train.py                the program as it is, with its attention by tilewise
  tilewise run -- torchrun --nproc-per-node 8 train.py""",
}


def entry() -> None:
    """The `tilewise` command of an installed package."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments (default: the process's own); returns the exit code."""
    try:
        code = _main(argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # while a closed pipe can still be told from a failure
        return code
    except BrokenPipeError:
        _discard_output()
        return UNREAD


def _main(argv: Sequence[str] | None) -> int:
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has already said what it had to say
        return int(stop.code or 0)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, ImportError, OSError, MemoryError) as error:
        if options.traceback:
            raise
        print(f"tilewise {options.command}: {sentence(error)}", file=sys.stderr)
        return USAGE if isinstance(error, ValueError) else UNUSABLE


def _discard_output() -> None:
    """Point standard output nowhere, so that what is still buffered does not fail again when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _run(options: argparse.Namespace) -> int:
    plain = options.command in PLAIN  # which print by themselves, and so run without `rich`
    commands = import_module(f"tilewise.cli.{'plain' if plain else 'commands'}")
    if options.threads and options.command != "run":
        import torch

        torch.set_num_threads(options.threads)
    return getattr(commands, options.command)(options)


def sentence(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        what = f'"tilewise[{EXTRA}]"' if package in PRINTERS else package
        return f"the package {package!r} is not installed; install it with: pip install {what}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if too_much := re.search(r"tried to allocate (\d+) bytes", text):
        return f"out of memory: {int(too_much[1]) / 1e9:,.1f} GB were wanted at once; give smaller lengths, batches or heads"
    unexpected = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    return f"{text} (run it with --traceback to see where)" if unexpected else text


def parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    top = argparse.ArgumentParser(
        prog="tilewise",
        description="Exact attention that never stores the score matrix.",
        epilog="examples:\n" + "\n".join(text.splitlines()[0] for text in EXAMPLES.values()) + f"\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"tilewise {_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, (add_options, description) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=description,
            description=description,
            epilog=f"examples:\n{EXAMPLES[name]}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(command)
        command.add_argument("--threads", type=_threads, metavar="N", help="threads of torch on the CPU (default: torch's own choice)")
        command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return top


def _version() -> str:
    from tilewise import __version__

    return __version__


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_positive.__name__ = "positive number"  # argparse names the type in its message


def _threads(text: str) -> int:
    number, cores = _positive(text), os.cpu_count() or 1
    if number > THREADS_A_CORE * cores:
        raise argparse.ArgumentTypeError(
            f"{number} is too many; this machine's {cores} cores take up to {THREADS_A_CORE * cores}, {THREADS_A_CORE} for each"
        )
    return number


_threads.__name__ = _positive.__name__


def _positives(text: str) -> tuple[int, ...]:
    return tuple(_positive(item) for item in text.split(","))


_positives.__name__ = "comma-separated list of positive numbers"


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


_seconds.__name__ = "number of seconds"


def _clocks(text: str) -> tuple[str, ...]:
    clocks = tuple(text.split(","))
    if not set(clocks) <= {"events", "wall"}:
        raise ValueError(text)
    return clocks


_clocks.__name__ = "list of clocks, events or wall"


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError(text)
    return int(part), int(parts)


_part.__name__ = "part, such as 1/2"


def _device(text: str):
    import torch

    try:
        return torch.device(text)
    except RuntimeError:
        raise ValueError(text) from None


_device.__name__ = "device"


def _demo_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", type=Path, default=Path("tilewise-report.html"), metavar="FILE", help="the page to write (default: %(default)s)"
    )
    command.add_argument("--serve", action="store_true", help="generate text with a small server instead, and write no page")
    command.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        help="train in N processes on the CPU that share each sequence instead, beside one process, bit by bit",
    )
    command.add_argument("--steps", type=_positive, default=100, metavar="N", help="training steps (default: %(default)s)")
    command.add_argument("--batch", type=_positive, metavar="N", help="windows of text a step (default: 2, on a GPU 16)")
    command.add_argument("--context", type=_positive, metavar="N", help="bytes a window (default: 1024, on a GPU 4096)")
    lengths = "of the sweep (default: 512 to 8192, on a GPU 1024 to 32768)"
    command.add_argument("--seqlens", type=_positives, metavar="N,N,...", help=lengths)
    command.add_argument("--device", type=_device, help="cpu, cuda, ... (default: a GPU where there is one)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (default: %(default)s)")
    command.add_argument(
        "--budget", dest="budget_s", type=_seconds, default=100.0, metavar="SECONDS",
        help="stop training and sweep early where they would take longer (default: %(default)g)",
    )  # fmt: skip
    command.set_defaults(
        usual={"steps": command.get_default("steps"), "seed": command.get_default("seed"), "budget_s": command.get_default("budget_s")}
    )


def _check_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--full", action="store_true", help="the full grid in place of the quick one (minutes)")
    command.add_argument("--backend", metavar="NAME,...", help="these backends only (default: all)")
    command.add_argument("--case", default="", metavar="TEXT", help="only checks with this text in their names")
    command.add_argument("--list", action="store_true", help="print the names of the checks, and run none")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: %(default)s)")
    command.add_argument("--device", type=_device, default="cpu", help="cpu, cuda, ... (default: %(default)s)")


def _bench_options(command: argparse.ArgumentParser) -> None:
    for name, example, meaning in (
        ("batch", "1,4", "batch sizes"),
        ("seqlen", "512,1024x4096", "lengths, or queries x keys"),
        ("heads", "8,32/8", "heads, or query heads / key heads"),
        ("head-dim", "64,192/128", "head_dim, or head_dim / head_dim_v"),
        ("mask", "causal,window:1023", "full, causal, window:LEFT[:RIGHT], prefix:N, chunked:N, documents:LEN:LEN:..."),
        ("causal", "0,1", "short for the masks full and causal"),
        ("dtype", "fp32,bf16", "fp32, bf16, fp16"),
        ("direction", "fwd,fwd+bwd", "fwd, bwd, fwd+bwd"),
        ("data", "normal,q x64", "distributions of the inputs (default: normal; of the set hard-inputs: all)"),
        ("set", "papers,cpu,models", "whole sets of workloads, in place of the sizes; decode, with --only, has contenders of its own"),
    ):
        command.add_argument(f"--{name}", metavar=example, help=meaning)
    command.add_argument(
        "names", nargs="*", metavar="NAME", help="the contenders; k1..k8 is a range of the ladder's rungs; train: a GPT's steps"
    )
    command.add_argument("--impl", metavar="NAME,...", help="the contenders, in another place (default: tilewise,sdpa,naive)")
    command.add_argument("--check", action="store_true", help="check the results, and time nothing")
    command.add_argument("--list", action="store_true", help="print the contenders that there are, and measure nothing")
    command.add_argument(
        "--budget",
        dest="budget_s",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="to time one contender on one workload (default: %(default)g)",
    )
    command.add_argument("--device", type=_device, help="cpu, cuda, ... (default: cuda for rungs, else cpu)")
    command.add_argument("--clock", type=_clocks, default=("events", "wall"), metavar="events,wall", help="clocks of a GPU (default: both)")
    command.add_argument("--once-above", type=_seconds, metavar="SECONDS", help="time a call that takes longer only once")
    command.add_argument("--limit", type=_seconds, metavar="SECONDS", help="begin no workload after so long")
    command.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of every N workloads: for N processes, a GPU each"
    )
    command.add_argument(
        "--only", metavar="PATTERN,...", help="of these workloads those whose names or ids match, such as 'T5*,Llama-3-8B'"
    )
    command.add_argument("--ahead", action="store_true", help="first compile what contenders need, in processes side by side")
    command.add_argument("--processes", type=_positive, metavar="N", help="that compile ahead (default: one a core)")
    command.add_argument("--no-memory", action="store_true", help="leave out the peak of memory")
    command.add_argument("--out", type=Path, metavar="FILE", help="append the rows to this file, as JSON lines")
    train = command.add_argument_group(
        "of `bench train`, which takes --seqlen, --budget (a contender and cell) and --limit (default: 240), too"
    )
    train.add_argument("--model", metavar="1.3B,2.7B", help="sizes of the GPT (default: both)")
    train.add_argument("--layers", type=_positive, metavar="N", help="in place of the model's own (default: those, or as many as fit)")
    train.add_argument("--tokens", type=_positive, metavar="N", help="of a step (default: 16384, or one sequence)")
    train.add_argument("--autocast", action="store_true", help="weights in fp32 and products in bf16 (default: all in bf16)")
    train.add_argument("--compiled", action="store_true", help="torch.compile what lies around attention")


def _explain_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--batch", default="1", metavar="N", help="(default: %(default)s)")
    command.add_argument("--seqlen", default="1024", metavar="N or QxK", help="length, or queries x keys (default: %(default)s)")
    command.add_argument("--heads", default="8", metavar="N or Q/K", help="heads, or query heads / key heads (default: %(default)s)")
    command.add_argument("--head-dim", default="64", metavar="N or N/V", help="head_dim, or head_dim / head_dim_v (default: %(default)s)")
    command.add_argument("--dtype", default="fp32", help="fp32, bf16, fp16 (default: %(default)s)")
    command.add_argument(
        "--mask", default="full",
        help="full, causal, window:LEFT[:RIGHT], prefix:N, chunked:N, documents:LEN:..., or an expression of masks (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--grad", action="store_true", help="with gradients")
    command.add_argument("--backend", metavar="NAME", help="ask for this backend")
    command.add_argument("--device", type=_device, default="cpu", help="cpu, cuda, ... (default: %(default)s)")


def _report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("rows", nargs="*", metavar="ROWS", help="JSON lines that bench wrote (default: benchmarks/results/*.jsonl)")
    command.add_argument(
        "--docs", nargs="+", type=Path, metavar="FILE", help="markdown files whose marked tables to rewrite (default: README.md, docs/)"
    )
    command.add_argument("--plots", type=Path, default=Path("docs/plots"), metavar="FOLDER", help="of the plots (default: %(default)s)")
    command.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page of the rows, and nothing else")


def _doctor_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="as JSON")


def _warmup_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", choices=("hopper", "triton"), default="hopper", help="of which backend (default: %(default)s)")
    command.add_argument("--arch", metavar="sm_89", help="with --backend triton: a GPU that need not be here (default: this machine's)")
    command.add_argument("--groups", metavar="1,4,8", help="with --backend triton: query heads for each key head (default: 1,4,8)")
    for name, example, meaning in (
        ("head-dim", "64,192/128", "head_dim, or head_dim / head_dim_v (default: all that have tiles of their own)"),
        ("dtype", "bf16,fp16", "bf16, fp16 (default: both)"),
        ("mask", "full,causal", "as bench takes them; numbers in them do not matter (default: full,causal,window:1)"),
        (
            "extras",
            "softcap,alibi+sink",
            "kernels that change scores: softcap, bias, alibi, sink, dropout, or several with + (default: plain ones)",
        ),
    ):
        command.add_argument(f"--{name}", metavar=example, help=meaning)
    command.add_argument("--precision", metavar="int8,int8_qk", help="kernels in 8 bits too, by these recipes of attention's precision=")
    command.add_argument("--processes", type=_positive, metavar="N", help="that compile at the same time (default: one a core)")
    command.add_argument(
        "--set", metavar="NAME,...", help="the kernels of these sets of workloads, as bench takes them, in place of the above"
    )
    command.add_argument("--forward", action="store_true", help="without the kernels of the backward pass")
    command.add_argument("--list", action="store_true", help="print the kernels, and compile none")
    command.add_argument("--clear", action="store_true", help="remove the compiled kernels of all versions, and compile none")


def _tune_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", choices=("hopper", "triton"), default="hopper", help="of which backend (default: %(default)s)")
    for name, example, meaning in (
        ("head-dim", "64,192/128", "head_dim, or head_dim / head_dim_v (default: all that have tiles of their own)"),
        ("dtype", "bf16", "bf16, fp16 (default: bf16)"),
        ("mask", "full,causal", "full, causal, window:LEFT[:RIGHT] (default: full,causal,window:1023)"),
        ("seqlen", "1024,4096", "lengths that count equally; the batch makes 16,384 tokens of them (default: 1024,4096,16384)"),
    ):
        command.add_argument(f"--{name}", metavar=example, help=meaning)
    command.add_argument(
        "--precision", metavar="int8,int8_qk", help="with --backend triton: tiles of Q K^T in int8, for these recipes, which count equally"
    )
    command.add_argument(
        "--most", type=_positive, metavar="N", help="shapes of tiles for each cell: those that arithmetic likes best (default: all)"
    )
    command.add_argument("--processes", type=_positive, metavar="N", help="that compile at the same time (default: one a core)")
    command.add_argument("--dry-run", action="store_true", help="list the candidates, and compile none")
    command.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/tune.jsonl"),
        metavar="FILE",
        help="append the rows here (default: %(default)s)",
    )


def _run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what to run, with its arguments")


COMMANDS = {
    "demo": (_demo_options, "train a small GPT with tilewise and with torch's SDPA, measure both, and write a report page"),
    "check": (_check_options, "run the correctness grid on this machine's backends"),
    "bench": (_bench_options, "measure attention against other implementations"),
    "explain": (_explain_options, "say which backend a call would use, and why"),
    "report": (_report_options, "turn rows of bench into tables, plots or a page"),
    "doctor": (_doctor_options, "say what is installed, and which backends are usable"),
    "tune": (_tune_options, "search the fastest kernels for this machine's GPU"),
    "warmup": (_warmup_options, "compile kernels ahead of time, on any machine, and keep them on disk"),
    "run": (_run_options, "run a program, unedited, with the attention of torch, flash_attn, transformers and diffusers by tilewise"),
}
