"""`pelton train-drafter`."""

from __future__ import annotations

from pathlib import Path

import click

from ..interrupts import held_interrupts
from .option_types import FiniteFloat


@click.command(name="train-drafter")
@click.argument("model")
@click.option(
    "--text",
    "texts",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="What to train on: a UTF-8 text, or .jsonl with a document in `text` of each line; several may be given.",
)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Directory for the drafter."
)
@click.option(
    "--kind",
    default="eagle",
    show_default=True,
    type=click.Choice(["eagle", "medusa"]),
    help="Recurrent over the tokens it guesses, or one head for each place.",
)
@click.option(
    "--steps", default=2000, show_default=True, type=click.IntRange(min=1), help="Training steps at most."
)
@click.option("--minutes", type=FiniteFloat(min=0, min_open=True), help="End the training after so long.")
@click.option(
    "--num-draft-tokens",
    default=4,
    show_default=True,
    type=click.IntRange(min=1, max=16),
    help="Tokens that the heads learn to guess in a row.",
)
@click.option(
    "--draft-vocab-size",
    default=8192,
    show_default=True,
    type=click.IntRange(min=1),
    help="Guesses are among so many of the text's most frequent tokens.",
)
@click.option(
    "--max-tokens",
    default=500_000,
    show_default=True,
    type=click.IntRange(min=2),
    help="Tokens of text to use; parts of a longer text are drawn.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
def command(
    model: str,
    texts: tuple[Path, ...],
    output: Path,
    kind: str,
    steps: int,
    minutes: float | None,
    num_draft_tokens: int,
    draft_vocab_size: int,
    max_tokens: int,
    seed: int,
) -> None:
    """Train heads that guess the tokens of MODEL from its hidden states, for `pelton build --drafter`.

    They learn what MODEL expects after each token of a text, best its own answers. How often it agrees with them is
    measured on a part of the text that is held out. Nothing is written before the end.
    """
    with held_interrupts():
        from ..compile.progress import Progress
        from ..compile.train_drafter import TrainRequest, train

    progress = Progress()
    request = TrainRequest(
        model=model,
        texts=texts,
        output=output,
        kind=kind,
        steps=steps,
        minutes=minutes,
        num_draft_tokens=num_draft_tokens,
        draft_vocab_size=draft_vocab_size,
        max_tokens=max_tokens,
        seed=seed,
    )
    _, acceptance = train(request, progress)
    progress.note(str(acceptance))
    progress.summary()
    click.echo(str(output))
