"""The command `refusion`: generate, view, eval, bench, train, plot, info, examples.

Contract: `main(argv)` returns an exit code and never shows a traceback for what the user can put right: one line on
stderr and 2. Answers go to stdout, everything else to stderr. Commands import what they need when they run: help must
not wait for torch. The flags of the decoding settings are made from the methods' configs; only their help is written here.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, Token, UnknownOptionError, UnusedCliTokensError

from refusion import __version__
from refusion.config import CONFIGS, AutoregressiveConfig, DecodeConfig, GenerationConfig, UserError, nearest
from refusion.progress import bar

if TYPE_CHECKING:
    from refusion.events import Event
    from refusion.generate import Config, Model, Result
    from refusion.training.loop import Decode
    from refusion.view.trace import TraceWriter

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
MOST_EXAMPLES, MOST_THREADS, MOST_AT_ONCE = 1_000_000, 1024, 4096  # many more take all memory

OVERVIEW = """Write text with slot-parallel diffusion language models, measure, train.

A response is cut into slots of a few tokens. Slots are written in any order,
several at once; inside a slot, tokens are read left to right. So an answer
takes far fewer passes of the model than it has tokens.

Start with:
  refusion generate --live "Work out (12+7)*3-8."
  refusion examples
  refusion COMMAND --help
"""

app = App(
    name="refusion", help=OVERVIEW, version=__version__, help_format="plaintext",
    default_parameter=Parameter(negative=()),
)  # fmt: skip

INPUT = Group("Model and prompt", sort_key=1)
OUTPUT = Group("Output", sort_key=2)
SLOTS = Group("Slots: how much is written at once", sort_key=3)
MASKED = Group("Masked diffusion: how much is written at once by --method llada and dream", sort_key=4)
WRITING = Group("Writing: length, chance and end", sort_key=5)
RUN = Group("Run", sort_key=1)
BENCHMARK = Group("Published benchmarks", sort_key=2)


def _switch(group: Group, help: str) -> Parameter:
    """A flag that is off unless given."""
    return Parameter(group=group, help=help, show_default=False)


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """The number of a flag that counts something. The library's own reading of it rounds 4.5 to 4."""
    text = tokens[-1].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r:.40}") from None


def _number(group: Group, help: str) -> Parameter:
    """A flag that takes a whole number."""
    return Parameter(group=group, help=help, converter=_whole)


SETTINGS_HELP = {
    "max_new_tokens": "Most tokens to write. Higher: room for longer answers, more memory.",
    "temperature": "0 takes the likeliest token. Higher: more varied, more often wrong; 1 draws as the model would.",
    "top_k": "Draw from this many likeliest tokens only. Lower: safer, less varied. 0 = off. Needs --temperature.",
    "top_p": "Draw from the likeliest tokens up to this probability. Lower: safer, less varied. 1 = off. "
    "Needs --temperature.",
    "seed": "Of all draws; the same seed gives the same text.",
    "stop": "End the text before this string. May be given several times.",
    "ignore_eos": "Do not stop where the model ends its answer, but at --max-new-tokens.",
    "slot_size": "Tokens per slot. Higher: more tokens per forward while the model is sure, more re-drafting when it "
    "is not.",
    "block_size": "Tokens per serial block; blocks are written left to right, their slots (llada, dream: their tokens) in "
    "any order. At least --slot-size. Higher: more freedom of order, more work per forward. llada, dream: 0 = one block.",
    "slot_threshold": "Write a slot when its first token is likelier than this (0 to 1). Lower: more slots at once, "
    "faster, riskier. Higher: surer and slower.",
    "token_threshold": "Accept drafted tokens that are verified as likelier than this (0 to 1). Lower: faster, "
    "riskier. Higher: surer and slower.",
    "slot_order": "confidence (the paper) writes any slots that are sure; left_to_right, an ablation, none before its time.",
    "slot_score": "What counts as a slot's sureness: its first draft (the paper), or, as ablations, the mean of all, or entropy.",
    "recompute": "An ablation: compute slots that were finished side by side once more. Slower.",
    "block_steps": "bd3lm: most forwards per block, each writes an equal share of it. Lower: faster, riskier. 0 = one "
    "for each token.",
    "steps": "Forwards for the whole response, unless a threshold or factor decides. Lower: more tokens at once, faster, "
    "riskier. 0 = one for each token.",
    "factor": "Write as many of the likeliest tokens as this risk allows, at least one. Higher: faster, riskier. "
    "Lower: surer and slower. 0 = off.",
    "cache": "What a block's later forwards take from its first one: none, prefix (all before the block) or dual (and all "
    "after it). More: less work per forward, less exact.",
    "remasking": "llada: which tokens of a forward are kept: low_confidence (the likeliest) or random.",
    "order": "dream: which tokens of a forward are kept: origin (by chance), maskgit_plus (the likeliest), topk_margin or "
    "entropy.",
    "confidence_threshold": "Write every token of the block that is likelier than this (0 to 1), at least one. Lower: "
    "faster, riskier. Higher: surer and slower. Off: 1 for bd3lm, 0 for llada and dream.",
}


def _settings_flags() -> type:
    """The settings of all methods as flags: the same names and types, unset unless given, and without their checks."""
    groups = {f.name: SLOTS for f in fields(DecodeConfig)} | {f.name: WRITING for f in fields(GenerationConfig)}
    entries: dict[str, tuple[str, Any, Any]] = {}
    for config in CONFIGS.values():
        hints = get_type_hints(config)
        for f in fields(config):
            default = config.DEFAULTS[f.name]
            shown = "" if isinstance(default, tuple | bool) else f" Default: the model's own, else {default}."
            kind = _number if hints[f.name] == int | None else Parameter
            parameter = kind(help=SETTINGS_HELP[f.name] + shown, group=groups.get(f.name, MASKED))
            entries.setdefault(f.name, (f.name, Annotated[hints[f.name], parameter], field(default=None)))
    return make_dataclass("Settings", entries.values(), namespace={"__module__": __name__}, kw_only=True, frozen=True)


if TYPE_CHECKING:
    Settings = DecodeConfig
else:
    Settings = _settings_flags()

if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[tuple(CONFIGS)]
SettingsFlags = Annotated[Settings, Parameter(name="*")]
UNSET = Settings()
ModelFlag = Annotated[
    str, Parameter(group=INPUT, help="A model of the package (nano, nano-ar), a Hugging Face folder, or a hub id.")
]
MethodFlag = Annotated[
    Method | None,
    Parameter(group=INPUT, help="refusion writes slots in any order, autoregressive token by token, with the same "
              "weights; llada and dream are masked diffusion, bd3lm is block diffusion, for models trained so. Default: what "
              "the model was trained for."),
]  # fmt: skip
RawFlag = Annotated[bool, _switch(INPUT, "Continue the prompt as it stands, without the chat template.")]
DeviceFlag = Annotated[
    str | None, Parameter(group=INPUT, help="cpu, cuda, cuda:1, ... Default: cuda where there is one, else cpu.")
]
DtypeFlag = Annotated[
    Literal["float32", "bfloat16"] | None,
    Parameter(group=INPUT, help="Number type of the weights. Default: float32 on a CPU, as stored elsewhere. bfloat16 "
              "halves the memory; answers may differ a little."),
]  # fmt: skip
ThreadsFlag = Annotated[
    int | None,
    _number(
        INPUT, "CPU threads. Default: torch's choice, one for each core. Small models are often fastest with 1 or 2."
    ),
]
LiveFlag = Annotated[bool, _switch(OUTPUT, "Show the slots filling while the answer is written (on stderr).")]
LiveDelayFlag = Annotated[
    float | None,
    Parameter(group=OUTPUT, help="Seconds that --live shows a round on a terminal. Default: 0.12. Higher: easier to "
              "follow; the figures leave it out."),
]  # fmt: skip
CompareFlag = Annotated[bool, _switch(OUTPUT, "Then write token by token with the same weights; print both figures.")]
ResultJsonFlag = Annotated[
    bool, _switch(OUTPUT, "Print one JSON object: text, token_ids, finish_reason, stats, settings.")
]
TraceFlag = Annotated[
    Path | None, Parameter(group=OUTPUT, help="Write every step to this file, one JSON object a line.")
]
LimitFlag = Annotated[
    int,
    _number(RUN, "Take the first N tasks of each family. Higher: surer figures, longer wait; to report, 100 or more."),
]
EvalLimitFlag = Annotated[
    int | None,
    _number(RUN, "Take the first N tasks of each family (default: 20), or N items of a benchmark (default: all). Higher: surer "
            "figures, longer wait; to report, 100 or more."),
]  # fmt: skip
TASK_HELP = "A published benchmark: gsm8k, math, humaneval, mbpp, arc-c, mmlu-pro, gpqa, bbh, aqua. Needs --data."
PRESET_HELP = "default: the model's own settings, answers of up to 512 tokens. paper: the paper's settings for the task. Flags win."
SAMPLES_HELP = "Where every answer is written, as JSON Lines. Default: samples-TASK-MODEL.jsonl."
OverridesFlag = Annotated[
    str,
    Parameter(group=RUN, allow_leading_hyphen=True, help="Any key of the recipe, such as --training.max-steps 500."),
]
OutFlag = Annotated[Path | None, Parameter(group=RUN, help="Folder of the run. Default: runs/NAME of the recipe.")]


# --- generate


@app.command(sort_key=1)
def generate(
    prompt: Annotated[str, Parameter(group=INPUT, help="What to answer. - reads it from standard input.")],
    /,
    *,
    model: ModelFlag = "nano",
    method: MethodFlag = None,
    raw: RawFlag = False,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    threads: ThreadsFlag = None,
    live: LiveFlag = False,
    live_delay: LiveDelayFlag = None,
    compare: CompareFlag = False,
    json: ResultJsonFlag = False,
    trace: TraceFlag = None,
    settings: SettingsFlags = UNSET,
) -> None:
    """Write an answer to a prompt.

    The answer goes to standard output, one line of figures to standard error. Put
    the prompt in quotes, and -- before a prompt that begins with a dash.
    For example:
      refusion generate --live "List: 84 48 26 51. First reverse, then keep those over 50."
    """
    given = _given(settings, method)
    if compare and json:
        raise UserError("--compare cannot be used with --json")
    delay = _delay(live, live_delay)
    text = _read_prompt(prompt)
    with _opened(trace) as file:
        loaded = _load(model, device, dtype, threads)
        config = _config(given, method, loaded)
        if compare:  # what a model does once, at its first forwards, belongs to neither figure
            loaded.generate(text, replace(config, max_new_tokens=1), raw)
        result = _write(loaded, text, config, raw, delay, file)
    _show(result, json)
    if compare:
        _compare(loaded, text, config, raw, result)
    elif not json:
        print(figures(result), file=sys.stderr)


def _delay(live: bool, given: float | None) -> float | None:
    """Seconds that the live view shows a round; None: no live view."""
    if given is not None and not 0 <= given < 3600:
        raise UserError(f"--live-delay must be between 0 and 3600 seconds, got {given}")
    if given is not None and not live:
        _warn("--live-delay is ignored without --live")
    if not live:
        return None
    return 0.12 if given is None else given


def _write(
    model: Model, prompt: str, config: Config, raw: bool, delay: float | None, trace: TextIO | None
) -> Result:  # fmt: skip
    """Generate, shown live and traced if asked for."""
    if delay is None and trace is None:
        return model.generate(prompt, config, raw)
    stream = model.stream(prompt, config, raw)
    ids, full = model.request(prompt, config, raw)
    eos = () if full.ignore_eos else model.folder.eos_token_ids
    with ExitStack() as stack:
        watchers: list[Callable[[Event], None]] = []
        writer = None
        if trace is not None:
            writer = _trace_writer(trace, model)
            writer.request(
                model=model.name, method=full.method, prompt=prompt, prompt_ids=ids, settings=full.to_dict(),
                eos_ids=list(eos),
            )  # fmt: skip
            watchers.append(writer.add)
        if delay is not None:
            from refusion.live import LiveView

            size = getattr(full, "slot_size", None)
            view = LiveView(model.tokenizer.decode, slot_size=size, eos=eos, delay=delay)
            watchers.append(stack.enter_context(view).add)
        result = _watched(stream, watchers)
        if writer is not None:
            writer.result({k: v for k, v in result.to_dict().items() if k != "prompt_ids"})
    return result


def _trace_writer(file: TextIO, model: Model) -> TraceWriter:
    from refusion.view.trace import TraceWriter

    with suppress(OSError):  # a pipe or a device holds nothing to empty
        file.truncate(0)
    return TraceWriter(file, model.tokenizer.token_text)


def _watched(stream: Generator[Event, None, Result], watchers: Sequence[Callable[[Event], None]]) -> Result:
    """Run to the end; every watcher gets every event as it happens."""
    while True:
        try:
            event = next(stream)
        except StopIteration as end:
            result: Result = end.value
            return result
        for watch in watchers:
            watch(event)


def _show(result: Result, as_json: bool) -> None:
    sys.stderr.flush()
    print(json.dumps(result.to_dict(events=True)) if as_json else result.text, flush=True)


def figures(result: Result) -> str:
    """The one line that says what an answer cost."""
    s = result.stats
    line = (
        f"{s.tokens} tokens in {s.forwards} forwards: {s.tokens_per_forward:.2f} tokens per forward, "
        f"{s.tokens_per_second:,.0f} tokens/s"
    )
    return line + ("" if result.finish_reason == "stop" else " (cut off at --max-new-tokens)")


def _compare(model: Model, prompt: str, config: Config, raw: bool, result: Result) -> None:
    """Figures of `result`, and those of the same weights token by token."""
    name = {"refusion": "slots", "autoregressive": "token by token"}.get(config.method, config.method)
    print(f"{name + ':':<16}{figures(result)}", file=sys.stderr)
    if isinstance(config, AutoregressiveConfig):
        _warn("--compare is ignored: this answer was written token by token already")
        return
    if not model.by_token:
        _warn(f"--compare is ignored: {model.name} has learnt {model.method}, not to write token by token")
        return
    shared = {f.name: getattr(config, f.name) for f in fields(AutoregressiveConfig)}
    other = model.generate(prompt, AutoregressiveConfig(**shared), raw)
    print(f"{'token by token:':<16}{figures(other)}", file=sys.stderr)
    if other.text != result.text:
        print(f"{'':<16}and another answer: {json.dumps(other.text, ensure_ascii=False)}", file=sys.stderr)


# --- view


@app.command(sort_key=1)
def view(
    trace: Annotated[Path, Parameter(group=INPUT, help="A file that refusion generate --trace wrote.")],
    /,
    *,
    html: Annotated[Path | None, Parameter(group=OUTPUT, help="Write a page to this file: one file that needs no "
                    "network, with a slider over all steps, and what every token's probability was.")] = None,
    gif: Annotated[Path | None, Parameter(group=OUTPUT, help="Write an animation to this file.")] = None,
    speed: Annotated[float, Parameter(group=OUTPUT, help="2 is twice as fast. Higher: shorter to watch, harder to "
                     "follow.")] = 1.0,
) -> None:  # fmt: skip
    """Look at how an answer was written, step by step.

    It is replayed on the terminal, unless --html or --gif is given. An answer
    that was cut short by Ctrl-C can be looked at too.
    For example:
      refusion generate --trace trace.jsonl "Work out (12+7)*3-8."
      refusion view trace.jsonl --html trace.html
    """
    if not 0.01 <= speed <= 100:
        raise UserError(f"--speed must be between 0.01 and 100, got {speed}")
    if html is not None and gif is not None and html.absolute() == gif.absolute():
        raise UserError("--html and --gif need a file each")
    from refusion.view.trace import read_trace

    read = read_trace(trace)
    if html is not None:
        from refusion.view.html import page

        _save("--html", html, trace, page(read, speed).encode())
    if gif is not None:
        from refusion.view.gif import animation

        _save("--gif", gif, trace, animation(read, speed))
    if html is None and gif is None:
        from refusion.view.replay import replay

        replay(read, speed)
        if read.stats is not None:
            print(read.figures(), file=sys.stderr)
    if not read.complete:
        _warn(f"{trace} ends before the answer is finished")


def _save(flag: str, path: Path, source: Path, content: bytes) -> None:
    try:
        if path.exists() and path.samefile(source):
            raise UserError(f"{flag} {path}: is the trace itself")
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror})") from None


# --- eval


@app.command(name="eval", sort_key=2)
def evaluate(
    *,
    model: ModelFlag = "nano",
    suite: Annotated[str, Parameter(group=RUN, help="The set of tasks. There is one: nano.")] = "nano",
    split: Annotated[str, Parameter(group=RUN, help="test, validation or hard (larger numbers, ...).")] = "test",
    limit: EvalLimitFlag = None,
    method: MethodFlag = None,
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    threads: ThreadsFlag = None,
    task: Annotated[str | None, Parameter(group=BENCHMARK, help=TASK_HELP)] = None,
    data: Annotated[Path | None, Parameter(group=BENCHMARK, help="Its file, as published, or the folder of it.")] = None,
    preset: Annotated[str, Parameter(group=BENCHMARK, help=PRESET_HELP)] = "default",
    samples: Annotated[Path | None, Parameter(group=BENCHMARK, help=SAMPLES_HELP)] = None,
    resume: Annotated[bool, _switch(BENCHMARK, "Go on with the answers in --samples, where they stopped.")] = False,
    json: Annotated[bool, _switch(RUN, "Print one JSON object instead of a table.")] = False,
    settings: SettingsFlags = UNSET,
) -> int:
    """Measure accuracy and tokens per forward on tasks with one right answer.

    Without --task, on the package's own suite. Every answer is judged by a
    checker; code is run in a sandbox.
    For example:
      refusion eval --model nano --split test --limit 100
      refusion eval --task gsm8k --data gsm8k/test.jsonl --limit 100 --resume
    """
    given = _given(settings, method)
    if task is not None:
        from refusion.evaluation import benchmark

        benchmark.check(task, data, preset, limit)
        loaded = _load(model, device, dtype, threads)
        try:
            with bar(task) as progress:
                report = benchmark.run(
                    loaded, task, data, config=_config(given, method, loaded), preset_name=preset, limit=limit,
                    samples=samples, resume=resume, progress=progress,
                )  # fmt: skip
        except KeyboardInterrupt:
            print("interrupted; every answer is saved, --resume continues", file=sys.stderr)
            return INTERRUPTED
        print(globals()["json"].dumps(report) if json else "\n".join(benchmark.table(report)))
        return 0
    if data is not None or samples is not None or resume or preset != "default":
        raise UserError("--data, --preset, --samples and --resume need --task")
    from refusion.evaluation.procedural import SPLITS

    if split not in SPLITS:
        raise UserError(f"split must be one of {', '.join(SPLITS)}, got {split!r}{nearest(split, SPLITS)}")
    from refusion.evaluation import evaluate as evaluation

    loaded = _load(model, device, dtype, threads)
    config = _config(given, method, loaded)
    with bar("tasks") as progress:
        report = evaluation.evaluate(loaded, suite, split, 20 if limit is None else limit, config, progress)
    print(globals()["json"].dumps(report) if json else "\n".join(_table(report)))
    return 0


def _table(report: dict[str, Any]) -> Iterator[str]:
    """The report of `eval` for people."""
    yield f"{report['model']} on {report['suite']}, {report['split']} split, method {report['method']}"
    yield ""
    yield f"{'family':<12}{'accuracy':>10}{'tokens/forward':>16}{'tasks':>8}"
    for name, entry in report["families"].items():
        yield f"{name:<12}{entry['accuracy']:>10.3f}{entry['tokens_per_forward']:>16.2f}{entry['n']:>8}"
    yield f"{'all':<12}{report['accuracy']:>10.3f}{report['tokens_per_forward']:>16.2f}{report['n']:>8}"
    yield ""
    yield f"standard error {report['stderr']:.3f}, {report['tokens_per_second']:,.0f} tokens/s"
    if "out_of_order" in report:
        yield f"{report['out_of_order']:.0%} of the answers of 3 slots or more were written out of order"
    yield "settings: " + _assignments(report["settings"])


# --- bench


@app.command(sort_key=3)
def bench(
    *,
    model: Annotated[list[str], Parameter(group=INPUT, help="Models to compare; give it several times for several.")] = ["nano"],  # noqa: B006
    methods: Annotated[
        str, Parameter(group=INPUT, help="Methods, with commas between. Token by token is always measured beside them.")
    ] = "refusion,autoregressive",
    device: DeviceFlag = None,
    dtype: DtypeFlag = None,
    threads: ThreadsFlag = None,
    suite: Annotated[str, Parameter(group=RUN, help="The tasks: nano.")] = "nano",
    split: Annotated[str, Parameter(group=RUN, help="train, validation, test or hard.")] = "test",
    limit: LimitFlag = 10,
    repeats: Annotated[int, _number(RUN, "Times that every prompt is answered. Higher: surer times.")] = 3,
    batch_sizes: Annotated[str, Parameter(group=RUN, help="Prompts answered at once, with commas between.")] = "1",
    report: Annotated[Path | None, Parameter(group=RUN, help="Also write JSON, Markdown and a picture into this folder.")] = None,
    json: Annotated[bool, _switch(RUN, "Print one JSON object instead of a Markdown table.")] = False,
    settings: SettingsFlags = UNSET,
) -> None:
    """Compare methods and models: speed, accuracy, memory, on the same prompts.

    Contestants take turns on every prompt, so a machine that slows down favours
    none. Let nothing else run meanwhile. Settings count for the methods that
    know them; the others take the model's own.
    For example:
      refusion bench --model nano --methods refusion,autoregressive --limit 10
    """
    given = _given(settings, None)
    sizes = [_batch_size(word.strip()) for word in batch_sizes.split(",")]
    from refusion.evaluation import bench as benchmark

    loaded = [_load(name, device, dtype, threads) for name in dict.fromkeys(model)]
    wanted = [name.strip() for name in methods.split(",") if name.strip()]
    entries = benchmark.contestants(loaded, wanted, [given], sizes)
    with bar("answers") as progress:
        measured = benchmark.run(entries, suite=suite, split=split, limit=limit, repeats=repeats, progress=progress)
    print(globals()["json"].dumps(measured) if json else benchmark.markdown(measured))
    if report is not None:
        benchmark.write(measured, report)


# --- train


@app.command(sort_key=4)
def train(
    recipe: Annotated[Path, Parameter(group=RUN, help="A TOML file, such as recipes/nano.toml.")],
    /,
    *overrides: OverridesFlag,
    out: OutFlag = None,
    resume: Annotated[bool, _switch(RUN, "Continue the run in --out where it was saved last, bit for bit.")] = False,
    device: Annotated[str | None, Parameter(group=RUN, help="cpu, cuda, ... Default: cuda if there is one.")] = None,
) -> int:
    """Train a model by a recipe.

    Ctrl-C saves and stops. The folder of the run gets metrics.jsonl, recipe.json
    and the model folders last/ and best/, for refusion generate --model.
    For example:
      refusion train recipes/nano-ar.toml --training.max-steps 500
    """
    from refusion.training.recipe import load

    plan = load(recipe, _recipe_keys(overrides))
    import torch

    from refusion.training import loop

    place = _train_device(device, torch)
    folder = out or Path("runs") / (plan.name or recipe.stem)
    decode = _validation(plan.objective.decoding)
    with bar(plan.name or folder.name) as progress:
        run = loop.train(plan, folder, resume=resume, device=place, decode=decode, progress=progress)
    steps = plan.training.max_steps
    if run.step < steps:
        print(f"stopped and saved at step {run.step} of {steps}; --resume continues", file=sys.stderr)
        return INTERRUPTED
    print(f"{folder / 'last'}  step {run.step}, {run.tokens:,} tokens")
    return 0


def _recipe_keys(tokens: Iterable[str]) -> dict[str, str]:
    """`--section.key value` or `--section.key=value`, any number of times, as {"section.key": "value"}."""
    from refusion.training.recipe import Recipe

    sections, keys, rest = [f.name for f in fields(Recipe)], {}, iter(tokens)
    for token in rest:
        name, equals, value = token.removeprefix("--").partition("=")
        section = name.replace("-", "_").partition(".")[0]
        if not token.startswith("--") or section not in sections:
            hint = nearest(name, ["out", "resume", "device"]) or nearest(section, sections)
            raise UserError(f"unknown option {token!r}; a key of the recipe is given as --section.key VALUE{hint}")
        value = value if equals else next(rest, "")
        if not value or value.startswith("--"):
            raise UserError(f"{token} needs a value")
        keys[name] = value
    return keys


def _train_device(device: str | None, torch: Any) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {device!r} cannot be used ({_one_line(error)[:100]})") from None
    return device


def _validation(defaults: dict[str, Any]) -> Decode:
    """Accuracy by decoding, as the training loop asks for it: of a model that is in no folder yet."""
    from refusion.evaluation.evaluate import validation_decode
    from refusion.generate import Model
    from refusion.models.checkpoint import FolderConfig
    from refusion.models.tokenizer import Tokenizer
    from refusion.models.transformer import Transformer

    def decode(transformer: Transformer, tokenizer: Tokenizer, limit: int) -> dict[str, float]:
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        folder = FolderConfig(
            transformer.config, "", tokenizer.mask_token_id, eos, tokenizer.bos_token_id, tokenizer.pad_token_id,
            defaults, {},
        )  # fmt: skip
        return validation_decode(Model("training", transformer, tokenizer, folder), limit)

    return decode


# --- plot


@app.command(sort_key=4)
def plot(
    runs: Annotated[list[Path], Parameter(group=RUN, help="Folders of runs, as refusion train --out made them.")],
    /,
    *,
    out: Annotated[
        Path | None,
        Parameter(group=RUN, help="The file: .png, .svg or .pdf. Default: plot.svg, in the run's folder, or, for several runs, "
                  "in the working directory."),
    ] = None,
    x: Annotated[Literal["steps", "tokens"], Parameter(group=RUN, help="What the values are drawn over.")] = "steps",
) -> None:  # fmt: skip
    """Draw how training runs went: losses, accuracy, tokens per forward, learning rate, speed.

    Several runs are drawn into the same panels. A run that goes on can be drawn too.
    Needs matplotlib: pip install 'refusion[report]'.
    For example:
      refusion plot runs/nano
      refusion plot runs/nano runs/nano-ar --x tokens --out both.png
    """
    from refusion.training.plot import plot as draw

    print(draw(runs, out, x))


# --- reproduce


@app.command(sort_key=4)
def reproduce(
    plan: Annotated[Path, Parameter(group=RUN, help="A TOML file, such as recipes/reproduce/nano.toml.")],
    /,
    *,
    out: Annotated[Path | None, Parameter(group=RUN, help="Folder of all results. Default: runs/reproduce-NAME.")] = None,
    max_steps: Annotated[
        int | None, _number(RUN, "Train each method for fewer steps, to see that everything works.")
    ] = None,
    device: Annotated[str | None, Parameter(group=RUN, help="cpu, cuda, ... Default: cuda if there is one.")] = None,
) -> int:
    """Repeat the paper's controlled comparison, and write the report.

    Every method continues from one autoregressive base on the same rows; settings
    are searched on the validation split and measured on the test split. Stopped
    by Ctrl-C, the same command goes on where it was.
    For example:
      refusion reproduce recipes/reproduce/nano.toml
    """
    import torch

    from refusion import reproduce as comparison

    loaded = comparison.load_plan(plan)
    if max_steps is not None:
        loaded = comparison.shortened(loaded, max_steps)
    folder = out or Path("runs") / f"reproduce-{loaded.name}"
    table = comparison.run(loaded, folder, device=_train_device(device, torch), progress=bar)
    if table is None:
        print("stopped and saved; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    print(folder / "report" / "report.md")
    return 0


# --- convert


@app.command(sort_key=4)
def convert(
    source: Annotated[str, Parameter(group=RUN, help="A model folder, a hub id, a GGUF file, or smollm2-135m.")],
    out: Annotated[Path, Parameter(group=RUN, help="The new folder.")],
    *,
    mask_token: Annotated[
        str | None,
        Parameter(group=RUN, help="Text of the mask token: a new one, or one that the tokenizer has and no text contains."),
    ] = None,
    dtype: Annotated[str, Parameter(group=RUN, help="Of the written weights: bfloat16 or float32.")] = "bfloat16",
    json: Annotated[bool, _switch(RUN, "Print one JSON object.")] = False,
) -> None:
    """Give an autoregressive model a mask token, so that it can be trained to fill slots.

    The new row of the embedding is the mean of all others. Train the folder with
    `refusion train RECIPE`, its path as model.start (docs/training.md).
    For example:
      refusion convert Qwen/Qwen3-0.6B qwen3-mask
    """
    from refusion.models.convert import convert as run

    made = run(source, out, mask_token=mask_token, dtype=dtype)
    if json:
        print(globals()["json"].dumps({**asdict(made), "folder": str(made.folder)}, ensure_ascii=False))
        return
    rows = f", in {made.new_rows} new rows" if made.new_rows else ", in a row that was there"
    print(f"{made.folder}: {made.parameters:,} parameters, mask token {made.mask_token!r} = {made.mask_token_id}{rows}")


# --- info


@app.command(sort_key=5)
def info(
    model: Annotated[str, Parameter(group=RUN, help="A model of the package, a model folder, or a hub id.")] = "nano",
    *,
    json: Annotated[bool, _switch(RUN, "Print one JSON object.")] = False,
) -> None:
    """Say what a model is: size, vocabulary, special tokens, settings.

    For example:
      refusion info nano
    """
    report = _describe(model)
    if json:
        print(globals()["json"].dumps(report, ensure_ascii=False))
        return
    shown = {**report, "defaults": _assignments(report["defaults"])}
    for name, value in shown.items():
        print(f"{name.replace('_', ' '):<16}{_readable(value)}")


def _describe(name: str) -> dict[str, Any]:
    from refusion.generate import check_defaults
    from refusion.models.checkpoint import read_config, resolve_folder
    from refusion.models.tokenizer import Tokenizer

    folder = resolve_folder(name)
    config, tokenizer = read_config(folder), Tokenizer.from_folder(folder)
    check_defaults(config, folder)
    method = str(config.defaults.get("method", "refusion")) if config.mask_token_id is not None else "autoregressive"
    wanted = CONFIGS[method]()
    shape = config.model
    return {
        "model": name, "folder": str(folder), "architecture": config.architecture, "parameters": config.parameters,
        "layers": shape.num_hidden_layers, "hidden_size": shape.hidden_size, "vocabulary": shape.vocab_size,
        "context": shape.max_position_embeddings, "mask_token_id": config.mask_token_id,
        "mask_token": tokenizer.mask_token, "eos_token_ids": list(config.eos_token_ids),
        "chat_template": tokenizer.has_chat_template, "method": method,
        "defaults": wanted.resolve(config.defaults).to_dict(), **_card(folder / "README.md"),
    }  # fmt: skip


def _card(path: Path) -> dict[str, Any]:
    """Licence and title of a model card, where there is one."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    licence = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("license:")), None)
    title = next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), None)
    return {"license": licence, "card": f"{path}" + (f" ({title})" if title else "")}


def _readable(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


# --- examples


@app.command(sort_key=6)
def examples(
    *,
    family: Annotated[str | None, Parameter(group=RUN, help="Only this family of tasks. Default: all of them.")] = None,
    count: Annotated[int, _number(RUN, "Prompts of each family.")] = 1,
    seed: Annotated[int, _number(RUN, "Another seed, other prompts.")] = 0,
    json: Annotated[bool, _switch(RUN, "Print a JSON list of {family, prompt, answer}.")] = False,
) -> None:
    """Print prompts that the nano model knows, with their answers.

    They are from the validation split: the model was not trained on them.
    For example:
      refusion examples --family sudoku --count 2
    """
    from refusion.evaluation.procedural import FAMILIES, take

    if not 1 <= count <= MOST_EXAMPLES:
        raise UserError(f"--count must be between 1 and {MOST_EXAMPLES:,}, got {count!s:.40}")
    items = [item for name in ([family] if family else FAMILIES) for item in take(name, "validation", count, seed)]
    if json:
        rows = [{"family": i.family, "prompt": i.prompt, "answer": i.answer} for i in items]
        print(globals()["json"].dumps(rows, ensure_ascii=False))
        return
    for item in items:
        print(f"# {item.family}\nrefusion generate {shlex.quote(item.prompt)}\n{_indented(item.answer)}\n")


# --- shared


def _given(settings: Any, method: str | None) -> dict[str, Any]:
    """The flags that were given, checked by the method they are for. Raises `UserError` naming the setting."""
    given = {f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) is not None}
    own = {f.name for f in fields(CONFIGS[method])} if method else set()
    for name, config in CONFIGS.items():
        names = {f.name for f in fields(config)} & given.keys() - (own if name != method else set())
        config(**{key: given[key] for key in names})
    return given


def _config(given: dict[str, Any], method: str | None, model: Model) -> Config:
    """The settings in the shape that the method takes; says which of them it ignores."""
    kind = CONFIGS[method or model.method]
    own = {f.name for f in fields(kind)}
    for name in sorted(given.keys() - own):
        _warn(f"{_flag(name)} is ignored: {model.name} writes by the method {kind.method} here")
    config = kind(**{name: value for name, value in given.items() if name in own})
    if model.settings(config).temperature == 0:
        for name in ("top_k", "top_p"):
            if name in given:
                _warn(f"{_flag(name)} is ignored at temperature 0")
    return config


def _batch_size(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= MOST_AT_ONCE):
        raise UserError(f"--batch-sizes must be whole numbers from 1 to {MOST_AT_ONCE:,} with commas between, got {word!r:.40}")
    return int(word)


def _load(name: str, device: str | None, dtype: str | None, threads: int | None) -> Model:
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UserError(f"--threads must be between 1 and {MOST_THREADS:,}, got {threads!s:.40}")
    import torch

    from refusion.generate import load

    if threads is not None:
        torch.set_num_threads(threads)
    return load(name, device, dtype)


def _read_prompt(prompt: str) -> str:
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # what is not UTF-8 has come in as lone surrogates, or not at all
    except UnicodeError:
        raise UserError("prompt is not UTF-8 text") from None
    return text


@contextmanager
def _opened(trace: Path | None) -> Iterator[TextIO | None]:
    """The trace file, opened before any work is done. Raises `UserError` when it cannot be written."""
    if trace is None:
        yield None
        return
    with _writing(trace):
        file = trace.open("a", encoding="utf-8")  # emptied when there is something to write
    try:
        yield file
    finally:
        with _writing(trace):
            file.close()


@contextmanager
def _writing(trace: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--trace {trace}: cannot be written ({error.strerror})") from None


def _assignments(settings: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _parsed(tokens: list[str]) -> Callable[[], Any]:
    """The command that the tokens name, with its arguments. Raises `CycloptsError`."""
    try:
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except UnknownOptionError:
        if "-" not in tokens:
            raise
        tokens.remove("-")  # standard input, taken for an option: say that it is none
        command, bound, _ = app.parse_args([*tokens, "--", "-"], exit_on_error=False, print_error=False)
    return lambda: command(*bound.args, **bound.kwargs)


def _open_streams() -> None:
    """A standard stream that came closed (`>&-`) is empty, or takes everything; and no file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an answer may hold what an old terminal cannot show


def _let_go() -> None:
    """Flush. A stream that takes nothing any more now leads nowhere, or Python would complain of it when it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(text: str, code: int) -> int:
    """Say what is wrong, if anybody listens."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    return code


def _no_memory(error: BaseException) -> bool:
    """torch has an error of its own for accelerators, and none for the memory of a CPU."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words


def main(argv: Iterable[str] | None = None) -> int:
    """Run the command line (default: this process's arguments) and return its exit code."""
    _open_streams()
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _parsed(tokens)()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (UserError, CycloptsError) as error:
        unquoted = isinstance(error, UnusedCliTokensError) and tokens[:1] == ["generate"]
        hint = " (a prompt of several words needs quotes)" if unquoted else ""
        return _complain(f"error: {_one_line(error)}{hint}", USAGE)
    except BrokenPipeError:  # the reader has gone: nobody is left to be told
        return BROKEN_PIPE
    except OSError as error:
        return _complain(f"error: {_one_line(error)}", USAGE)
    except (MemoryError, RuntimeError) as error:
        if not _no_memory(error):
            raise
        return _complain(f"error: out of memory ({_one_line(error)[:100]})", USAGE)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    finally:
        _let_go()
