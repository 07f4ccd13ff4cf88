"""The decision of the gate: what the evidence shows by itself or against a baseline, budgets, suppressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leakscope.detect.pair import Comparison, compare
from leakscope.detect.profile import Key, Profile, Side, fingerprint, key_of, known_of, profile_of, stable_frame
from leakscope.detect.sentence import sentence
from leakscope.errors import ExitCode
from leakscope.gate.budgets import Budget
from leakscope.gate.measure import budget_checks
from leakscope.gate.suppressions import Suppression, names_of, suppressing, suppressing_verdict
from leakscope.model.gate import OUTCOMES, Check, Difference, Gate, Measured, SiteChange, Suppressed
from leakscope.model.results import Chain, Growth, Report, Site, Verdict

MAX_CHANGES = 500
"""Changed sites that are listed, those that gained most bytes first."""
EXIT_CODES = {"fail": ExitCode.LEAK_FOUND, "inconclusive": ExitCode.INCONCLUSIVE, "pass": ExitCode.DONE}


@dataclass(frozen=True)
class Rules:
    """What to check against, besides the evidence itself. ``per``: the unit of work of the comparison."""

    budgets: Sequence[Budget] = ()
    suppressions: Sequence[Suppression] = ()
    allow_inconclusive: bool = False
    per: str | None = None


def decide(
    report: Report, rules: Rules, baseline: Profile | None = None, baseline_name: str = ""
) -> tuple[Report, Gate]:
    """(the report with the verdict that the gate gives, the gate). ``report`` was made with its runs.

    With a baseline the verdict is that of the comparison, and head's own verdicts become findings. Raises
    BadInputError for a unit of work or a budget that the evidence cannot be measured by.
    """
    hidden = _hidden(report, rules.suppressions)
    own, gone = _visible([report.verdict, *report.findings], hidden, rules.suppressions)
    if any(verdict.sites for verdict, _ in gone):
        own = [verdict for verdict in own if not _only_short(verdict)]
    checks = [_suppressed_check(verdict, by) for verdict, by in gone]
    budgeted = budget_checks(report, rules.budgets, hidden.keys())
    difference = None
    if baseline is None:
        found = _judged_alone(own, report, rules.budgets, budgeted)
    else:
        head = profile_of(report, lambda site: site.id in hidden)
        base = replace(baseline, sides=_unhidden(baseline, rules.suppressions))
        compared = compare(base, head, own, report.runs, rules.per)
        difference = _difference(compared, baseline_name)
        found = _judged_against(compared, report)
        report = replace(
            report,
            verdict=compared.verdict,
            findings=[*compared.others, *_not_in(own, (compared.verdict, *compared.others))],
        )
    if baseline is None and gone:
        lead = own[0] if own else _nothing_else(gone)
        report = replace(report, verdict=lead, findings=[*own[1:], *(verdict for verdict, _ in gone)])
    checks = sorted([*found, *budgeted, *checks], key=lambda c: OUTCOMES.index(c.outcome))
    result = _result(checks, rules.allow_inconclusive)
    suppressed = tuple(_use(s, hidden, report, gone) for s in rules.suppressions)
    return report, Gate(
        result, int(EXIT_CODES[result]), tuple(checks), difference, suppressed, rules.allow_inconclusive,
        _notes(report, suppressed),
    )  # fmt: skip


def _result(checks: Sequence[Check], allow_inconclusive: bool) -> str:
    outcomes = {check.outcome for check in checks}
    if "fail" in outcomes:
        return "fail"
    return "inconclusive" if "inconclusive" in outcomes and not allow_inconclusive else "pass"


# --- suppressions -----------------------------------------------------------------------------------------------------


def _hidden(report: Report, suppressions: Sequence[Suppression]) -> dict[str, Suppression]:
    """Id of a site → what suppresses it."""
    return {site.id: by for site in report.sites if (by := suppressing(site, suppressions)) is not None}


def _unhidden(baseline: Profile, suppressions: Sequence[Suppression]) -> dict[Key, Side]:
    return {
        key: side
        for key, side in baseline.sides.items()
        if not any(s.matches(names_of(side.stack or side.frames, side.slab_cache)) for s in suppressions)
    }


def _visible(
    verdicts: Sequence[Verdict], hidden: dict[str, Suppression], suppressions: Sequence[Suppression]
) -> tuple[list[Verdict], list[tuple[Verdict, Suppression]]]:
    """(verdicts that stand, those that are suppressed whole and by what). A finding of which some sites are suppressed
    stands for the others."""
    stand: list[Verdict] = []
    gone: list[tuple[Verdict, Suppression]] = []
    for verdict in verdicts:
        if verdict.verdict == "not_leak":
            stand.append(verdict)
        elif verdict.sites:
            left = tuple(site for site in verdict.sites if site not in hidden)
            if left:
                stand.append(replace(verdict, sites=left))
            else:
                gone.append((verdict, hidden[verdict.sites[0]]))
        elif (by := suppressing_verdict(verdict, suppressions)) is not None:
            gone.append((verdict, by))
        else:
            stand.append(verdict)
    return stand, gone


def _only_short(verdict: Verdict) -> bool:
    """Whether counters alone cannot tell for want of time: beside events, which need none, that leads to nothing."""
    return verdict.verdict == "inconclusive" and verdict.kind == "window_too_short" and not verdict.sites


def _nothing_else(gone: Sequence[tuple[Verdict, Suppression]]) -> Verdict:
    said = tuple(f"suppressed: {by.pattern} ({by.reason})" for _, by in gone)
    return Verdict("not_leak", "cache_warmup", gone[0][0].layer, 0.8, reasons=("all that leaks is suppressed", *said))


def _use(
    suppression: Suppression,
    hidden: dict[str, Suppression],
    report: Report,
    gone: Sequence[tuple[Verdict, Suppression]],
) -> Suppressed:
    sites = [s for s in report.sites if hidden.get(s.id) is suppression and (s.live_bytes or s.allocated_objects)]
    others = [verdict for verdict, by in gone if by is suppression and not verdict.sites]
    return Suppressed(
        suppression.pattern,
        suppression.reason,
        f"{suppression.path}:{suppression.line}",
        len(sites),
        len(others),
        sum(s.live_bytes for s in sites) + sum(v.kept_bytes for v in others),
        sum(s.live_objects for s in sites),
    )


def _suppressed_check(verdict: Verdict, by: Suppression) -> Check:
    check = _check("leak", "suppressed", verdict, {})
    return replace(check, message=f"{check.message}; suppressed by leak:{by.pattern}", reason=by.reason)


# --- what the evidence shows ------------------------------------------------------------------------------------------


def _judged_alone(
    own: Sequence[Verdict], report: Report, budgets: Sequence[Budget], budgeted: Sequence[Check]
) -> list[Check]:
    """Without a baseline a leak fails, unless a budget for its very sites holds."""
    chains = _chains(report.chains)
    lead = own[0] if own else None
    if lead is None or lead.verdict == "not_leak":
        return [_passed(lead)]
    if lead.verdict == "inconclusive":
        return [_check("evidence", "inconclusive", lead, chains)]
    kept = {check.key for check in budgeted if check.outcome == "pass"}
    allowed = [b for b in budgets if b.what == "site" and _budget_key(b) in kept]
    sites = {site.id: site for site in report.sites}
    checks = []
    for verdict in own:
        if verdict.verdict == "leak":
            by = _allowing(verdict, allowed, sites)
            check = _check("leak", "known" if by else "fail", verdict, chains)
            checks.append(replace(check, message=f"{check.message}; within the budget {by.name}") if by else check)
    return checks


def _budget_key(budget: Budget) -> str:
    return fingerprint(("budget", budget.what, budget.name, budget.layer, budget.where.rpartition(":")[2]))


def _allowing(verdict: Verdict, budgets: Sequence[Budget], sites: dict[str, Site]) -> Budget | None:
    of = [sites[site] for site in verdict.sites if site in sites]
    return next((b for b in budgets if of and all(b.covers(site) for site in of)), None)


def _judged_against(compared: Comparison, report: Report) -> list[Check]:
    chains = _chains(report.chains)
    known = [_check("leak", "known", verdict, chains) for verdict in compared.known]
    known = [replace(check, message=f"{check.message}; the baseline has it as well") for check in known]
    verdict = compared.verdict
    if verdict.verdict == "leak":
        worse = [_check("regression", "fail", v, chains) for v in (verdict, *compared.others)]
        return [*worse, *known]
    if verdict.verdict == "inconclusive":
        return [_check("evidence", "inconclusive", verdict, chains), *known]
    return [replace(_passed(verdict), rule="regression", name="no regression"), *known]


def _not_in(own: Sequence[Verdict], regressions: Sequence[Verdict]) -> list[Verdict]:
    """Head's own verdicts that no regression is about."""
    sites = {site for verdict in regressions for site in verdict.sites}
    whats = {known_of(v).what for v in regressions if not v.sites}
    return [
        verdict
        for verdict in own
        if not (set(verdict.sites) & sites) and (verdict.sites or known_of(verdict).what not in whats)
    ]


def _passed(verdict: Verdict | None) -> Check:
    reasons = "; ".join(verdict.reasons) if verdict else "nothing is kept"
    kind = verdict.kind if verdict else ""
    return Check("leak", "pass", "no leak", reasons, fingerprint(("leak",)), kind, verdict.layer if verdict else "")


def _chains(chains: Sequence[Chain]) -> dict[str, str]:
    return {chain.site: " → ".join(link.name for link in chain.links if link.name) for chain in chains}


def _check(rule: str, outcome: str, verdict: Verdict, chains: dict[str, str]) -> Check:
    """A verdict as a check."""
    culprit = verdict.culprit
    frame = culprit.frame if culprit else ""
    counter = culprit.counter if culprit and not frame else ""
    stack = culprit.stack if culprit else ()
    what = frame or counter or (culprit.object if culprit else "") or (culprit.slab_cache if culprit else "")
    growth = verdict.growth
    message = sentence(verdict)
    if outcome in ("fail", "inconclusive"):
        said = [reason for reason in verdict.reasons if reason not in message]
        message = "; ".join((message, *said, *(f"missing: {m}" for m in verdict.missing)))
    if frame:
        key = key_of(verdict.layer, verdict.kind, [*stack, frame])
    else:
        key = (verdict.layer, verdict.kind, *known_of(verdict).what)
    return Check(
        rule,
        outcome,
        f"{verdict.layer or 'memory'}: {stable_frame(frame) if frame else what or verdict.kind}",
        message,
        fingerprint((rule, *key)),
        verdict.kind,
        verdict.layer,
        frame,
        stack,
        counter,
        growth.bytes_per_s if growth else None,
        None,
        "bytes/s" if growth else "",
        verdict.sites,
        chain=chains.get(verdict.sites[0], "") if verdict.sites else "",
        measures=_measures(growth, outcome),
    )


def _measures(growth: Growth | None, outcome: str) -> tuple[Measured, ...]:
    if growth is None:
        return ()
    return (Measured("growth", growth.bytes_per_s, growth.ci_low, growth.ci_high, None, "bytes/s", outcome),)


def _difference(compared: Comparison, name: str) -> Difference:
    changed = [change for change in compared.changes if change.what != "same"]
    listed = tuple(
        SiteChange(
            change.what,
            change.side.layer,
            change.side.kind,
            change.side.frames,
            change.kept_objects,
            change.kept_bytes,
            change.expected_objects,
            change.expected_bytes,
            fingerprint(change.key),
            change.allowed_objects,
        )
        for change in changed[:MAX_CHANGES]
    )
    work = compared.work
    return Difference(name, work.unit, work.base, work.head, work.ratio, listed, len(compared.changes) - len(changed))


def _notes(report: Report, suppressed: Sequence[Suppressed]) -> tuple[str, ...]:
    """What a reader of the result must know besides: incomplete inputs, suppressions that hide nothing."""
    notes = [f"{i.get('path', 'input')}: {problem}" for i in report.inputs for problem in i.get("problems", ())]
    notes += [f"{one.where}: leak:{one.pattern} suppresses nothing; remove it" for one in suppressed if not one.used]
    return tuple(notes)
