"""The context manager that everything with a ``close`` is."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager whose end is :meth:`close`."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; closing twice is harmless."""
