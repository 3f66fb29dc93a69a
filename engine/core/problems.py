"""What is wrong with a spec, collected with pointers. Knows nothing of torch."""

from glasshouse.errors import FieldProblem


class SpecProblems(Exception):
    """The spec cannot be planned; carries every problem found so far."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        super().__init__("; ".join(f"{item.pointer}: {item.detail}" for item in problems))
        self.problems = problems


class Findings:
    """Problems and warnings of one spec, in the order they were found."""

    def __init__(self) -> None:
        self.problems: list[FieldProblem] = []
        self.warnings: list[FieldProblem] = []

    def problem(self, pointer: str, detail: str, code: str = "invalid") -> None:
        """Note something that prevents the job from running."""
        self.problems.append(FieldProblem(pointer, detail, code))

    def warn(self, pointer: str, detail: str, code: str = "warning") -> None:
        """Note something that the author of the spec should know."""
        self.warnings.append(FieldProblem(pointer, detail, code))

    def stop(self) -> None:
        """Raise what has been found, if anything prevents the job.

        Raises:
            SpecProblems: at least one problem has been noted.
        """
        if self.problems:
            raise SpecProblems(self.problems)


def one(pointer: str, detail: str, code: str = "invalid") -> SpecProblems:
    """Make the exception of a single problem."""
    return SpecProblems([FieldProblem(pointer, detail, code)])
