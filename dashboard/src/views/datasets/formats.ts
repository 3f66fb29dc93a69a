// The formats of files, as the catalog has them. Pure.
/** An entry of `GET /catalog/datasets`: a built-in dataset, or a file format with its options. */
export interface Known { name: string; kind: "builtin" | "format"; suffixes?: string[]; schema: { properties: Record<string, unknown> } }

/** The format with the longest suffix that the name has: `.images.zip` before `.zip`. Empty if none. */
export function formatOf(name: string, formats: readonly Pick<Known, "name" | "suffixes">[]): string {
  const lower = name.toLowerCase();
  const fitting = formats.flatMap((one) => (one.suffixes ?? []).filter((suffix) => lower.endsWith(suffix)).map((suffix) => ({ name: one.name, suffix })));
  return fitting.sort((a, b) => b.suffix.length - a.suffix.length)[0]?.name ?? "";
}
