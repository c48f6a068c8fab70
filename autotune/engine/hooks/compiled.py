"""Let a failing compilation cost speed, not the training: what cannot be compiled runs eagerly.

Dynamo compiles a piece of code before it runs it, so a piece whose compilation failed has neither drawn a random
number nor moved a running mean: it is run as written, in the same call, and so is every later call of the model.
A failure that shows only when a backward pass is compiled is raised there: nothing can take that call back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_LOGGER = "torch._dynamo.convert_frame"
"""Where Dynamo says that it went on without; it tells in no other way."""


class EagerFallback(logging.Filter):
    """Keeps compiled models running, and the warning about an error that was suppressed out of the log.

    Attributes:
        has_failed: a compilation has failed.
    """

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        """Prepare.

        Args:
            on_failure: called at the first failure.
        """
        super().__init__()
        self.has_failed = False
        self._on_failure = on_failure

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have failures of this process suppressed, unless the script asks for errors that exclude that."""
        dynamo: Any = torch._dynamo.config
        if dynamo.fail_on_recompile_limit_hit:
            yield
            return
        before, dynamo.suppress_errors = dynamo.suppress_errors, True
        logger = logging.getLogger(_LOGGER)
        logger.addFilter(self)
        try:
            yield
        finally:
            logger.removeFilter(self)
            dynamo.suppress_errors = before

    def follow(self, model: nn.Module) -> None:
        """Have calls of a compiled model run eagerly once a compilation has failed."""
        compiled = model.__dict__["_compiled_call_impl"]

        def call(*args: Any, **kwargs: Any) -> Any:
            return (model._call_impl if self.has_failed else compiled)(*args, **kwargs)

        model.__dict__["_compiled_call_impl"] = call

    def filter(self, record: logging.LogRecord) -> bool:
        """Take note of a record, and return whether it is to be logged."""
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno != logging.WARNING or error is None:
            return True
        if not self.has_failed:
            self.has_failed = True
            self._on_failure(error)
        return False
