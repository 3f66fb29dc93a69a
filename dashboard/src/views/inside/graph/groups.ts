// Groups of a large network: consecutive layers in forward order with a common name prefix. Pure.
// A group is a contiguous range of that order, so the graph of groups has no cycles.

/** Layers from `from` up to, excluding, `to` in forward order, as one box; it may be a single layer. */
export interface Box {
  readonly id: string;
  readonly from: number;
  readonly to: number;
  /** The layer's name, or the common prefix of the group. */
  readonly label: string;
}

/** More boxes than this at one level are grouped. */
export const MAX_BOXES = 120;
/** The most boxes shown at once. */
export const MOST = 600;
const CHUNKS = 40;

const tokens = (name: string) => name.split(/[._]/);
const prefix = (name: string, depth: number) => tokens(name).slice(0, depth).join("_");
export const idOf = (from: number, to: number) => `${from}-${to}`;

/** The boxes to show: a group whose id is in `open` is replaced by its members. */
export function boxes(names: readonly string[], open: ReadonlySet<string>, maxBoxes = MAX_BOXES): Box[] {
  return inside(names, 0, names.length, open, maxBoxes);
}

function inside(names: readonly string[], from: number, to: number, open: ReadonlySet<string>, maxBoxes: number): Box[] {
  return divided(names, from, to, maxBoxes).flatMap((box) => (box.to - box.from > 1 && open.has(box.id) ? inside(names, box.from, box.to, open, maxBoxes) : [box]));
}

function divided(names: readonly string[], from: number, to: number, maxBoxes: number): Box[] {
  if (to - from <= maxBoxes) return range(from, to).map((at) => boxOf(names, at, at + 1));
  const depths = Math.max(...names.slice(from, to).map((name) => tokens(name).length));
  for (let depth = 1; depth < depths; depth++) {
    const starts = range(from, to).filter((at) => at === from || prefix(names[at]!, depth) !== prefix(names[at - 1]!, depth));
    if (starts.length > maxBoxes) break;
    if (starts.length > 1) return starts.map((at, number) => boxOf(names, at, starts[number + 1] ?? to));
  }
  const size = Math.ceil((to - from) / CHUNKS);
  return range(0, Math.ceil((to - from) / size)).map((chunk) => boxOf(names, from + chunk * size, Math.min(to, from + (chunk + 1) * size)));
}

function boxOf(names: readonly string[], from: number, to: number): Box {
  const first = names[from]!;
  if (to - from === 1) return { id: idOf(from, to), from, to, label: first };
  const last = names[to - 1]!;
  const shared = sharedTokens(first, last);
  return { id: idOf(from, to), from, to, label: shared ? `${shared}*` : `${first} … ${last}` };
}

function sharedTokens(one: string, other: string): string {
  const [a, b] = [tokens(one), tokens(other)];
  let length = 0;
  for (let n = 0; n < Math.min(a.length, b.length) && a[n] === b[n]; n++) length += a[n]!.length + 1;
  return one.slice(0, length);
}

function range(from: number, to: number): number[] {
  return Array.from({ length: to - from }, (_, n) => from + n);
}

/** Resolve the inputs of layers to layers or data fields: `lstm.1.0` is an output of `lstm`. */
export function readers(layers: readonly { name: string; inputs: readonly string[] }[]): { edges: [from: number, to: number][]; fields: Map<string, number[]> } {
  const places = new Map(layers.map((layer, at) => [layer.name, at]));
  const edges: [number, number][] = [];
  const fields = new Map<string, number[]>();
  layers.forEach((layer, at) => {
    for (const input of layer.inputs) {
      const source = places.get(input) ?? places.get(input.split(".")[0]!);
      if (source !== undefined) edges.push([source, at]);
      else fields.set(input, [...(fields.get(input) ?? []), at]);
    }
  });
  return { edges, fields };
}

/** The edges between boxes, without duplicates, from those between layers. */
export function between(shown: readonly Box[], edges: readonly [number, number][]): [number, number][] {
  const of: number[] = [];
  shown.forEach((box, place) => of.push(...new Array<number>(box.to - box.from).fill(place)));
  const found = new Map<string, [number, number]>();
  for (const [a, b] of edges) {
    const [from, to] = [of[a]!, of[b]!];
    if (from !== to) found.set(`${from} ${to}`, [from, to]);
  }
  return [...found.values()];
}
