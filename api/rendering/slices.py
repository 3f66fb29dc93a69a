"""Parse the slice in a request, such as ``0:4,:,::2``. Pure function."""

from api.http.answers import bad_parameter
from glasshouse import slices


def parse(text: str, shape: tuple[int, ...]) -> tuple[slices.Index, ...]:
    """Parse a slice of a tensor of this shape. A range that is too long is cut, as in NumPy.

    Raises:
        InvalidRequest: It has another form, too many axes, a bad index, or an empty range.
    """
    try:
        return slices.parse(text, shape)
    except slices.BadSlice as error:
        raise bad_parameter("slice", str(error)) from error
