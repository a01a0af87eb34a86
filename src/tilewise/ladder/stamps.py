"""A rung with time stamps: its own source, with a stamp (sm90/trace.py) before each call that begins a phase (sm90/phases.py).

The files of the rungs hold no stamps. Which call begins which phase is said here, once for all rungs; the source of a rung is read, the stamps are
written into its syntax tree, and what results is a module of its own. What a rung compiles to without a trace therefore cannot depend on this file.
"""

import ast
import functools
import linecache
import sys
from pathlib import Path
from types import ModuleType

from tilewise.sm90.phases import Phase

BEGINS = {  # the function that is called, or a method after its dot
    "load": Phase.LOAD,
    "tma.load": Phase.LOAD,
    ".producer_acquire": Phase.EMPTY,
    ".consumer_wait": Phase.WAIT,
    "arch.sync_threads": Phase.WAIT,
    "arch.barrier": Phase.WAIT,
    "take_turn": Phase.TURN,
    "scores": Phase.SCORES,
    "cuda_cores.scores": Phase.SCORES,
    "fragments.scores": Phase.SCORES,
    "cuda_cores.softmax": Phase.SOFTMAX,
    "fragments.hide": Phase.SOFTMAX,
    "fragments.online_softmax": Phase.SOFTMAX,
    "cuda_cores.accumulate": Phase.OUTPUT,
    "fragments.product": Phase.OUTPUT,
    "cuda_cores.store": Phase.STORE,
    "fragments.finish": Phase.STORE,
    "gradients.add_rows": Phase.ADD,
    "gradients.store_rows": Phase.STORE,
}
MORE = "tilewise.sm90.trace", "tilewise.sm90.phases.Phase"  # what a stamped module imports in addition to its own


def possible(module: str) -> bool:
    """Whether calls of `tilewise.ladder.<module>` begin phases."""
    try:
        return bool(with_stamps(source_of(module)))
    except ValueError:
        return False


@functools.cache
def stamped(module: str) -> ModuleType:
    """`tilewise.ladder.<module>` with stamps; ValueError where no call begins a phase. Its `launch` takes the events before its config:
    (blocks * WARPS * SLOTS, 2) int32."""
    name = f"{__name__}.{module}"
    source, file = with_stamps(source_of(module)), f"<{name}>"
    made = ModuleType(name)
    made.__file__ = file
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where the DSL looks for the source of a function
    sys.modules[name] = made
    exec(compile(source, file, "exec"), made.__dict__)
    return made


def stand_in():
    """Of the events, for the compiler."""
    from tilewise.sm90.dsl import Int32, cute, make_fake_tensor

    return make_fake_tensor(Int32, (cute.sym_int(), 2), (2, 1), assumed_align=8)


def source_of(module: str) -> str:
    return (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")


def with_stamps(source: str) -> str:
    """The source of a rung with stamps. ValueError where no call in it begins a phase."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    calls = {name: {called(call) for call in calls_in(node)} & set(functions) for name, node in functions.items()}
    begin = {name for name, node in functions.items() if name not in BEGINS and any(map(phase_of, calls_in(node)))}
    if not begin:
        raise ValueError("no call of this source begins a phase")
    while more := {name for name in set(functions) - begin - set(BEGINS) if calls[name] & begin}:  # those that hand the stamps on
        begin |= more
    roles = {called(call) for call in calls_in(functions["kernel"].body[-1])} & begin
    for name in begin:
        node = functions[name]
        for call in calls_in(node):
            if called(call) in begin:
                call.args.append(ast.Name("events" if called(call) == "kernel" else "stamps"))
        if name == "launch":
            place = [argument.arg for argument in node.args.args].index("config")
            node.args.args.insert(place, argument("events: cute.Tensor"))
            continue
        node.args.args.append(argument("events: cute.Tensor" if name == "kernel" else "stamps: trace.Stamps"))
        node.body = marked(node.body)
        if name == "kernel":
            node.body[-1:-1] = ast.parse("stamps = trace.start(events)").body
        if name in roles:
            node.body += ast.parse("trace.stop(stamps)").body
    imports = [f"from {module} import {name}" for module, _, name in (each.rpartition(".") for each in MORE)]
    tree.body[1:1] = ast.parse("\n".join(imports)).body
    return ast.unparse(ast.fix_missing_locations(tree))


def marked(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements with stamps between them, none twice for one phase; those of blocks inside as well, except where a compiled-in question is asked.

    Where two products are in flight at once, their phase ends when the first is there: that is a phase of its own, and nothing in between is stamped.
    Neither is it between products that add to sums, until these are there, and others among them.
    """
    found, now, in_flight, adding = [], None, False, False
    for at, statement in enumerate(body):
        if isinstance(statement, ast.For | ast.While | ast.If) and not asks_the_compiler(statement):
            statement.body, now = marked(statement.body), None
            if isinstance(statement, ast.If):
                statement.orelse = marked(statement.orelse)
            found.append(statement)
            continue
        phases = [phase for call in calls_in(statement) if (phase := phase_of(call))]
        waits = [call for call in calls_in(statement) if called(call) == "warpgroup.wait_group"]
        issues = any(called(call) == "fragments.scores" for call in calls_in(statement))
        if adding:
            adding = not waits
        elif phases and phases[0] == Phase.OUTPUT and Phase.SCORES in until_the_wait(body[at + 1 :]):
            found += mark(now := Phase.OUTPUT)
            adding = True
        elif issues and Phase.OUTPUT in until_the_wait(body[at + 1 :]):
            found += mark(Phase.ISSUE)
            in_flight = True
        elif in_flight and waits:
            found += [*mark(Phase.SCORES), statement, *mark(Phase.SOFTMAX)]
            now, in_flight = Phase.SOFTMAX, False
            continue
        elif phases and phases[0] != now and not in_flight:
            found += mark(now := phases[0])
        found.append(statement)
    return found


def until_the_wait(body: list[ast.stmt]) -> list[Phase]:
    """The phases that begin before the products issued so far are waited for."""
    found = []
    for statement in body:
        if any(called(call) == "warpgroup.wait_group" for call in calls_in(statement)):
            break
        found += [phase for call in calls_in(statement) if (phase := phase_of(call))]
    return found


def mark(phase: Phase) -> list[ast.stmt]:
    return ast.parse(f"trace.mark(stamps, Phase.{phase.name})").body


def argument(text: str) -> ast.arg:
    return ast.parse(f"def f({text}): pass").body[0].args.args[0]


def asks_the_compiler(statement: ast.stmt) -> bool:
    """Whether it is an `if const_expr(...)`, of which one branch is compiled."""
    return isinstance(statement, ast.If) and isinstance(statement.test, ast.Call) and called(statement.test) == "const_expr"


def calls_in(node: ast.AST) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]


def called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def phase_of(call: ast.Call) -> Phase | None:
    name = called(call)
    return BEGINS.get(name) or BEGINS.get(f".{name.rpartition('.')[2]}")
