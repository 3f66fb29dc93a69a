// The layout of a graph: rows from the inputs down, branches side by side. Pure.
// A layered (Sugiyama) layout: longest paths give the rows, edges that span rows get a dummy node in each, barycenters
// give the order, and a few iterations pull each box toward its neighbors without overlaps.

export interface Point { x: number; y: number }

export interface Placed {
  /** The center of each node. */
  readonly nodes: readonly Point[];
  /** The points of each edge, from the center of its source to that of its target. */
  readonly routes: readonly (readonly Point[])[];
  readonly width: number;
  readonly height: number;
}

export const BOX = { width: 168, height: 46, gapX: 26, gapY: 34 } as const;
const LANE = 22; // the width of an edge that crosses a row
const MOST_LANES = 4000; // if there were more, long edges are straight
const SWEEPS = 6;
const PULLS = 24;

/** The row of each node: one below its lowest source; a node without sources is just above its first reader. */
export function ranks(num: number, edges: readonly [number, number][]): number[] {
  const rank = new Array<number>(num).fill(0);
  const readers: number[][] = Array.from({ length: num }, () => []);
  const open = new Array<number>(num).fill(0);
  for (const [from, to] of edges) {
    readers[from]!.push(to);
    open[to]!++;
  }
  const isSource = open.map((count) => count === 0);
  const ready = open.flatMap((count, node) => (count === 0 ? [node] : []));
  for (let at = 0; at < ready.length; at++) {
    for (const to of readers[ready[at]!]!) {
      rank[to] = Math.max(rank[to]!, rank[ready[at]!]! + 1);
      if (--open[to]! === 0) ready.push(to);
    }
  }
  for (let node = 0; node < num; node++) {
    if (isSource[node] && readers[node]!.length) rank[node] = Math.min(...readers[node]!.map((to) => rank[to]!)) - 1;
  }
  return rank;
}

export function place(num: number, edges: readonly [number, number][]): Placed {
  if (!num) return { nodes: [], routes: [], width: 0, height: 0 };
  const rank = ranks(num, edges);
  const lanes = edges.reduce((sum, [from, to]) => sum + rank[to]! - rank[from]! - 1, 0);
  const paths = edges.map(([from, to]) => [from, to]);
  const links: [number, number][] = [];
  let next = num;
  paths.forEach((path) => {
    const [from, to] = [path[0]!, path[1]!];
    if (lanes <= MOST_LANES) for (let row = rank[from]! + 1; row < rank[to]!; row++) path.splice(-1, 0, (rank.push(row), next++));
    for (let n = 1; n < path.length; n++) links.push([path[n - 1]!, path[n]!]);
  });
  const rows = rowsOf(rank);
  const [above, below] = neighbors(next, links);
  order(rows, above, below);
  const size = (node: number) => (node < num ? BOX.width + BOX.gapX : LANE);
  const x = positions(rows, above, below, size);
  const points = x.map((at, node) => ({ x: at, y: rank[node]! * (BOX.height + BOX.gapY) + BOX.height / 2 }));
  const left = Math.min(...points.map((point, node) => point.x - size(node) / 2));
  for (const point of points) point.x -= left;
  const width = Math.max(...points.map((point, node) => point.x + size(node) / 2));
  const height = rows.length * (BOX.height + BOX.gapY) - BOX.gapY;
  return { nodes: points.slice(0, num), routes: paths.map((path) => path.map((node) => points[node]!)), width, height };
}

function rowsOf(rank: readonly number[]): number[][] {
  const rows: number[][] = Array.from({ length: Math.max(...rank) + 1 }, () => []);
  rank.forEach((row, node) => rows[row]!.push(node));
  return rows;
}

function neighbors(num: number, links: readonly [number, number][]): [number[][], number[][]] {
  const above: number[][] = Array.from({ length: num }, () => []);
  const below: number[][] = Array.from({ length: num }, () => []);
  for (const [from, to] of links) {
    above[to]!.push(from);
    below[from]!.push(to);
  }
  return [above, below];
}

/** Sort each row by the mean position of its neighbors, downward and upward in turns. */
function order(rows: number[][], above: number[][], below: number[][]): void {
  const at: number[] = [];
  const note = (row: number[]) => row.forEach((node, place) => (at[node] = place));
  rows.forEach(note);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    const near = down ? above : below;
    for (const row of down ? rows : [...rows].reverse()) {
      const wish = new Map(row.map((node) => [node, mean(near[node]!.map((other) => at[other]!)) ?? at[node]!]));
      row.sort((a, b) => wish.get(a)! - wish.get(b)! || at[a]! - at[b]!);
      note(row);
    }
  }
}

function positions(rows: number[][], above: number[][], below: number[][], size: (node: number) => number): number[] {
  const x: number[] = [];
  for (const row of rows) {
    let end = -row.reduce((sum, node) => sum + size(node), 0) / 2;
    for (const node of row) {
      x[node] = end + size(node) / 2;
      end += size(node);
    }
  }
  for (let sweep = 0; sweep < PULLS; sweep++) {
    for (const row of sweep % 2 ? [...rows].reverse() : rows) {
      const wish = row.map((node) => mean([...above[node]!, ...below[node]!].map((other) => x[other]!)) ?? x[node]!);
      separated(row, wish, size).forEach((at, place) => (x[row[place]!] = at));
    }
  }
  return x;
}

/** Positions in the given order, as close to the desired ones as possible without overlaps: overlapping blocks merge at their mean. */
function separated(row: readonly number[], wish: readonly number[], size: (node: number) => number): number[] {
  const offsets: number[] = [];
  row.forEach((node, place) => offsets.push(place ? offsets[place - 1]! + (size(row[place - 1]!) + size(node)) / 2 : 0));
  const blocks: { sum: number; num: number }[] = [];
  for (let place = 0; place < row.length; place++) {
    let block = { sum: wish[place]! - offsets[place]!, num: 1 };
    while (blocks.length && blocks.at(-1)!.sum / blocks.at(-1)!.num > block.sum / block.num) {
      const before = blocks.pop()!;
      block = { sum: block.sum + before.sum, num: block.num + before.num };
    }
    blocks.push(block);
  }
  const places = blocks.flatMap((block) => new Array<number>(block.num).fill(block.sum / block.num));
  return places.map((start, place) => start + offsets[place]!);
}

function mean(values: readonly number[]): number | null {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** An SVG path through the points: vertical at the rows, curved between them. */
export function curve(points: readonly Point[]): string {
  const [first] = points;
  if (!first) return "";
  let path = `M${first.x.toFixed(1)} ${first.y.toFixed(1)}`;
  for (let n = 1; n < points.length; n++) {
    const [a, b] = [points[n - 1]!, points[n]!];
    const middle = (a.y + b.y) / 2;
    path += `C${a.x.toFixed(1)} ${middle.toFixed(1)} ${b.x.toFixed(1)} ${middle.toFixed(1)} ${b.x.toFixed(1)} ${b.y.toFixed(1)}`;
  }
  return path;
}
