"""Trains a policy: `python -m launch.train --paper=SLUG`."""

from launch import flags


def train(config):
    """Prints the resolved config and runs it."""
    from research.loop import run

    print(config)
    run(config, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    flags.main(train, __doc__)
