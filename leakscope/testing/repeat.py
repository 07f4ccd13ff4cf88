"""A test function that runs its body once for each iteration of a leak test, coroutine functions too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import closing
from typing import Any

from leakscope.testing.run import LeakTest


def repeated(function: Callable[..., Any], test: LeakTest) -> Callable[..., Any]:
    """``function`` with its body repeated, with the same arguments each time."""
    if inspect.iscoroutinefunction(function):  # whoever runs coroutines runs this one

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            result = None
            with closing(test.iterations()) as iterations:
                for _ in iterations:
                    result = await function(*args, **kwargs)
            return result

        return coroutine

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        result = None
        with closing(test.iterations()) as iterations:
            for _ in iterations:
                result = function(*args, **kwargs)
        return result

    return plain
