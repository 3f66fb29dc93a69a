// Reads the .npy files in which the service returns tensors. Values become doubles; complex values their magnitude. Pure.

export interface Tensor {
  readonly shape: readonly number[];
  readonly values: Float64Array;
}

export class BadFile extends Error {}

type Reader = (view: DataView, at: number) => number;
const READERS: Record<string, readonly [bytes: number, read: Reader]> = {
  f2: [2, (view, at) => half(view.getUint16(at, true))],
  f4: [4, (view, at) => view.getFloat32(at, true)],
  f8: [8, (view, at) => view.getFloat64(at, true)],
  c8: [8, (view, at) => Math.hypot(view.getFloat32(at, true), view.getFloat32(at + 4, true))],
  i1: [1, (view, at) => view.getInt8(at)],
  i2: [2, (view, at) => view.getInt16(at, true)],
  i4: [4, (view, at) => view.getInt32(at, true)],
  i8: [8, (view, at) => Number(view.getBigInt64(at, true))],
  u1: [1, (view, at) => view.getUint8(at)],
  u2: [2, (view, at) => view.getUint16(at, true)],
  u4: [4, (view, at) => view.getUint32(at, true)],
  u8: [8, (view, at) => Number(view.getBigUint64(at, true))],
  b1: [1, (view, at) => view.getUint8(at)],
};

/** Throws BadFile if it is not a .npy file, or truncated. */
export function readNpy(buffer: ArrayBuffer): Tensor {
  const view = new DataView(buffer);
  if (buffer.byteLength < 12 || view.getUint32(0) !== 0x934e554d || view.getUint16(4) !== 0x5059) throw new BadFile("The response is not a .npy file.");
  const wide = view.getUint8(6) > 1;
  const begin = wide ? 12 : 10;
  const end = begin + (wide ? view.getUint32(8, true) : view.getUint16(8, true));
  if (end > buffer.byteLength) throw new BadFile("The header of the .npy file is truncated.");
  const header = new TextDecoder("latin1").decode(new Uint8Array(buffer, begin, end - begin));
  const found = /'descr':\s*'[<|=]?([a-z]\d+)'.*'fortran_order':\s*False.*'shape':\s*\(([\d,\s]*)\)/s.exec(header);
  const reader = found && READERS[found[1]!];
  if (!found || !reader) throw new BadFile(`The .npy header is not supported: ${header.slice(0, 100)}`);
  const shape = found[2]!.split(",").filter((part) => part.trim()).map(Number);
  const size = shape.reduce((all, length) => all * length, 1);
  const [bytes, read] = reader;
  if (buffer.byteLength - end < size * bytes) throw new BadFile("The values of the .npy file are truncated.");
  const values = new Float64Array(size);
  for (let n = 0; n < size; n++) values[n] = read(view, end + n * bytes);
  return { shape, values };
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}
