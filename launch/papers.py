"""Lists the catalogue, or shows one paper in full: `python -m launch.papers [SLUG ...]`."""

import inspect
import sys

from absl import app

import losses


def table() -> str:
    """The catalogue as a Markdown table."""
    lines = [
        "| paper | function | kind | base | arXiv | needs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for p in losses.papers():
        needs = ", ".join(losses.paper(p.slug).needs)
        lines.append(f"| {p.slug} | `{p.name}` | {p.kind} | {p.base} | {p.arxiv} | {needs} |")
    return "\n".join(lines)


def full(slug: str) -> str:
    """One paper: bibliography, equation, needs, defaults, composition, flags."""
    from research.settings import SETTINGS

    p = losses.entry(slug)
    composed = losses.paper(p.slug)
    lines = [
        f"{p.slug}: {p.title}",
        f"arXiv {p.arxiv}, {p.year or 'undated'}; {p.kind} on {p.base}; {p.module}.{p.name}",
        "",
        inspect.getdoc(p.function),
        "",
        f"The function needs     {', '.join(p.needs)}",
        f"The composition needs  {', '.join(composed.needs)}",
        "",
        "Composition and flags:",
    ]
    for slot, stages in composed.describe().items():
        for stage in stages if isinstance(stages, list) else [stages]:
            lines.append(f"  {slot}: {stage['function']}")
            listed = isinstance(stages, list)
            path = f"{slot}.{stage['function']}" if listed else slot
            hyper = {k: v for k, v in stage.items() if k != "function"}
            lines += [f"    --config.{path}.{k}={v}" for k, v in hyper.items()]
    settings = SETTINGS.get(p.slug, {})
    lines += ["", "Settings of the run:" if settings else "Settings of the run: the default job"]
    lines += [f"    --config.{k}={v}" for k, v in settings.items()]
    lines += ["", f"Run it: python -m launch.train --paper={p.slug}"]
    return "\n".join(lines)


def main(argv):
    try:
        print("\n\n".join(full(slug) for slug in argv[1:]) if argv[1:] else table())
    except losses.CatalogueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main)
