"""Collect the problems of a spec, each with a JSON pointer. Independent of torch."""

from glasshouse.errors import FieldProblem


class SpecProblems(Exception):
    """The spec cannot be planned. Carries every problem found so far."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        super().__init__("; ".join(f"{item.pointer}: {item.detail}" for item in problems))
        self.problems = problems


class Findings:
    """Problems and warnings of one spec, in the order they were found."""

    def __init__(self) -> None:
        self.problems: list[FieldProblem] = []
        self.warnings: list[FieldProblem] = []

    def problem(self, pointer: str, detail: str, code: str = "invalid") -> None:
        """Add a problem that prevents the job from running."""
        self.problems.append(FieldProblem(pointer, detail, code))

    def warn(self, pointer: str, detail: str, code: str = "warning") -> None:
        """Add a warning for the author of the spec."""
        self.warnings.append(FieldProblem(pointer, detail, code))

    def stop(self) -> None:
        """Raise the problems found so far, if there are any.

        Raises:
            SpecProblems: at least one problem was added.
        """
        if self.problems:
            raise SpecProblems(self.problems)


def one(pointer: str, detail: str, code: str = "invalid") -> SpecProblems:
    """Create the exception for a single problem."""
    return SpecProblems([FieldProblem(pointer, detail, code)])
