"""A slice that a request asks for, such as ``0:4,:,::2``. Pure."""

from api.http.answers import bad_parameter
from glasshouse import slices


def parse(text: str, shape: tuple[int, ...]) -> tuple[slices.Index, ...]:
    """Read a slice of a tensor of this shape; a range that is too long is cut, as in numpy.

    Raises:
        InvalidRequest: it has another form, too many axes, an index out of range, or a range that
            has nothing of its axis.
    """
    try:
        return slices.parse(text, shape)
    except slices.BadSlice as error:
        raise bad_parameter("slice", str(error)) from error
