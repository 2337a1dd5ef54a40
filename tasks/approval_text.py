"""What a person sees who is asked to approve a promotion."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.tasks.promote import Decision, checked_name, model_metrics
from trainwright.tasks.runs.alias import Alias, find_alias
from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.metric_names import shown_metrics
from trainwright.tasks.units import metric
from trainwright.tasks.verdicts import verdicts


def approval_text(
    run: Run, decision: Decision, name: str | None, address: Callable[[str], str]
) -> str:
    """What a person who approves a promotion sees, as Markdown.

    It has the metrics of the model and of the current one, the verdicts, and links. `address`
    gives the address of a path of the service. Empty if nothing is to be decided.
    """
    if decision.alias is None:
        return ""
    current, _ = find_alias(run.root(), checked_name(name, run.job()), decision.alias)
    before = current.metrics if current is not None else {}
    rows = [
        f"| {shown} | {metric(value)} | {metric(old) if (old := before.get(key)) else '–'} |"
        for shown, key, value in _compared_metrics(model_metrics(run), decision.metric)
    ]
    judged = verdicts(run.job().train.target, run.find(Result), run.find(Recommendation))
    links = [
        f"[{words}]({address(path.format(run=f'{linked.job_name}/{linked.id}'))})"
        for words, path, linked in _linked(run, current)
    ]
    return "\n".join(
        [
            f"{decision.reason}.",
            "",
            f"| metric | this run | {decision.alias} now |",
            "|---|---|---|",
            *rows,
            "",
            *(f"- {verdict.words}" for verdict in judged),
            f"- {' · '.join(links)}",
            f"- run: `{run.uri}`",
            f"- current: `{decision.current or 'none'}`",
        ]
    )


def _compared_metrics(metrics: dict[str, float], first: str | None) -> list[tuple[str, str, float]]:
    """Words, name and value of each metric; the one that decides comes first."""
    names = {name.replace("_", " "): name for name in metrics}
    shown = sorted(shown_metrics(metrics).items(), key=lambda item: names[item[0]] != first)
    return [(words, names[words], value) for words, value in shown]


def _linked(run: Run, current: Alias | None) -> list[tuple[str, str, Run]]:
    links = [("the run", "page/#/run/{run}", run), ("its report", "runs/{run}/report", run)]
    if current is not None and current.run != run.uri:
        links.append(("the current run", "page/#/run/{run}", Run(current.run, run.settings)))
    return links
