"""Read archives of images. Pillow is imported only when a file is read."""

from pathlib import Path

from engine.datasets.reading import Format, ReadOptions
from engine.datasets.writer import DatasetWriter


def read_images(path: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read images as ``image``, ``label`` and ``file``."""
    from engine.datasets.image_files import read_files  # noqa: PLC0415 (a large library)

    read_files(path, writer, options)


FORMATS = (
    Format(
        name="images.zip",
        summary="Images in the folders of a zip archive; the folder is the class.",
        read=read_images,
        suffixes=(".images.zip",),
        options=("resize",),
    ),
)
