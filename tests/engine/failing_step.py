"""A step that fails once, as if the device had."""

import pytest

from engine.worker.model_runner import ModelRunner


def fail_next_step(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """The next step of any engine in this process raises; those after it do not."""
    execute = ModelRunner.execute

    def fail(*_: object) -> None:
        monkeypatch.setattr(ModelRunner, "execute", execute)
        raise RuntimeError(message)

    monkeypatch.setattr(ModelRunner, "execute", fail)
