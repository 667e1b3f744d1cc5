"""What the probes of hidden states and of earlier answers came to, as a page that is kept."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.predictors.agreement import Agreement
from benchmarks.predictors.state_probes import AgeResult, StartResult
from benchmarks.predictors.turns import TurnsResult

_ARMS = {
    "length": "the prompt's length alone",
    "signs": "ListMLE network on signs alone",
    "today": "ListMLE network on all that predictors see today: token embeddings, signs, length",
    "today, ridge": "ridge regression on the same",
    "mean": "ridge on the mean of the built-in model's states over the prompt's tokens",
    "last": "ridge on the state of the prompt's last token",
    "last + today": "ridge on both",
    "last, network": "ListMLE network on the state of the last token, after the layer that ridge picked",
    "last + today, network": "the same, and what predictors see today",
    "twice": "a second answer to the same prompt, as a prediction",
}
_AGE_ARMS = {
    "age": "the number of tokens so far",
    "start": "what predictors see today, of the whole answer, less the tokens so far",
    "survived": "the same features, trained at this age on the answers that got so far",
    "first": "the prompt's own last state, trained at this age",
    "now": "the state of the latest token, trained at this age",
    "both": "the two states side by side",
}
_TURN_ARMS = {
    "new_tokens": "the prompt's new tokens",
    "last_answer": "the answer before",
    "mean_answer": "the mean of the logarithms of all answers before",
    "without": "ListMLE network on the prompt's new tokens",
    "network": "the same network, and the three features of earlier answers that predictors have",
}


@dataclass(frozen=True)
class ProbesReport:
    """`num_seeds`: each with five folds. `ages` and `turns` by data set. `state_ms_a_token`: of one core, up to the
    layer `cost_layer`."""

    num_seeds: int
    starts: Sequence[StartResult]
    ages: Mapping[str, Sequence[AgeResult]]
    turns: Mapping[str, TurnsResult]
    state_ms_a_token: float
    cost_layer: int


def shown(value: Agreement) -> str:
    return f"{value.value:.3f} ± {value.half_width:.3f}"


def probes_as_markdown(report: ProbesReport) -> str:
    """The kept form."""
    lines = [
        "# Output lengths from hidden states, along the way, and from earlier answers",
        "",
        "`WEIR_TEST_DATA=... python -m benchmarks.predictors.probe answers WORK`, `... states WORK`, "
        "`... report WORK --out shared/docs/results`.",
        "",
        f"Kendall's tau-b with the true lengths within each data set, held out (five folds, {report.num_seeds} seeds, "
        "mean of the seeds); ± is the 95 % interval by the jackknife over prompts (over conversations for turns), so "
        "it holds for other prompts of the kind. Layer and penalty of every ridge are chosen by inner folds of the "
        "training folds. `gain` is over `today`, paired. States are those of SmolLM2-135M in int8: in the sets named "
        "`own` it gave the answers too, in the others it is a foreign small model.",
        "",
        "## At the start",
        "",
        *_legend(_ARMS),
        "",
        "| data set | prompts | " + " | ".join(_ARMS) + " |",
        "|---|" + "--:|" * (1 + len(_ARMS)),
        *(
            _row([start.name, str(start.num_prompts), *(_cell(start.taus, arm) for arm in _ARMS)])
            for start in report.starts
        ),
        "",
        "| data set | gain of `last` over `today, ridge` | gain of `last` over `today` | layers that ridge picked |",
        "|---|--:|--:|---|",
        *(
            _row([s.name, shown(s.gain("last", "today, ridge")), shown(s.gain("last", "today")), _picked(s)])
            for s in report.starts
        ),
        "",
        f"Reading a prompt's state after {report.cost_layer} layers takes {report.state_ms_a_token:.2f} ms of one core "
        "a token (median over prompts, processor time).",
        *_age_part(report.ages),
        *_turn_part(report.turns),
    ]
    return "\n".join(lines) + "\n"


def probes_as_json(report: ProbesReport) -> str:
    def taus(found: Mapping[str, Agreement]) -> dict[str, Any]:
        return {arm: {"tau": one.value, "half_width": one.half_width} for arm, one in found.items()}

    content = {
        "num_seeds": report.num_seeds,
        "state_ms_a_token": report.state_ms_a_token,
        "cost_layer": report.cost_layer,
        "starts": [
            {"name": s.name, "num_prompts": s.num_prompts, "chosen": dict(s.chosen), "taus": taus(s.taus)}
            for s in report.starts
        ],
        "ages": {
            name: [{"age": r.age, "num_answers": r.num_answers, "taus": taus(r.taus)} for r in results]
            for name, results in report.ages.items()
        },
        "turns": {
            name: {
                "num_requests": r.num_requests,
                "num_later": r.num_later,
                "taus": taus({arm: getattr(r, arm) for arm in _TURN_ARMS}),
            }
            for name, r in report.turns.items()
        },
    }
    return json.dumps(content, indent=2) + "\n"


def _age_part(ages: Mapping[str, Sequence[AgeResult]]) -> list[str]:
    lines = ["", "## Along the way", "", *_legend(_AGE_ARMS), ""]
    lines += [
        "What is left of answers that go on after so many tokens; `mixed`: a queue of all answers, each at a random "
        "one of the ages that it reached. Answers end at 512 tokens at most.",
        "",
        "| data set | after | answers | "
        + " | ".join(_AGE_ARMS)
        + " | gain of `both` over `survived` | over `first` |",
        "|---|--:|" + "--:|" * (3 + len(_AGE_ARMS)),
    ]
    for name, results in ages.items():
        for result in results:
            after = "mixed" if result.age is None else str(result.age)
            cells = [_cell(result.taus, arm) for arm in _AGE_ARMS]
            gains = [shown(result.gain("both", base)) for base in ("survived", "first")]
            lines.append(_row([name, after, str(result.num_answers), *cells, *gains]))
    return lines


def _turn_part(turns: Mapping[str, TurnsResult]) -> list[str]:
    lines = ["", "## Later turns of conversations", "", *_legend(_TURN_ARMS), ""]
    lines += [
        "| data set | requests | later turns | " + " | ".join(_TURN_ARMS) + " | gain of `network` |",
        "|---|" + "--:|" * (3 + len(_TURN_ARMS)),
    ]
    for name, result in turns.items():
        cells = [shown(getattr(result, arm)) for arm in _TURN_ARMS]
        lines.append(_row([name, str(result.num_requests), str(result.num_later), *cells, shown(result.gain)]))
    return lines


def _legend(arms: Mapping[str, str]) -> list[str]:
    return [f"- `{arm}`: {meaning}" for arm, meaning in arms.items()]


def _cell(taus: Mapping[str, Agreement], arm: str) -> str:
    return shown(taus[arm]) if arm in taus else "n/a"


def _picked(start: StartResult) -> str:
    most = sorted(start.chosen.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name.rpartition(' ')[2]} ({count})" for name, count in most)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
