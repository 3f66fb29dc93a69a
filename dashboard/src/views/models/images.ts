// An image file as a value of a request: the file itself if it fits, else resized by the browser to what the model takes.

export interface Picture {
  /** A data URL of a PNG or JPEG file. */
  url: string;
  /** What was changed; null: nothing. */
  note: string | null;
}

const SENT_AS_IS: ReadonlySet<string> = new Set(["image/png", "image/jpeg"]);

/** Read a file. Throws a text for a person if it is no image. */
export async function pictureOf(file: Blob, width: number, height: number): Promise<Picture> {
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("The browser cannot read this file as an image.");
  }
  const fits = bitmap.width === width && bitmap.height === height;
  if (fits && SENT_AS_IS.has(file.type)) return { url: await dataUrl(file), note: null };
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d")!;
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff"; // behind transparent pixels
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  const note = fits ? null : `The browser resized it from ${bitmap.width} × ${bitmap.height} to ${width} × ${height} pixels.`;
  return { url: canvas.toDataURL("image/png"), note };
}

function dataUrl(file: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error("The file could not be read."));
    reader.readAsDataURL(file);
  });
}
