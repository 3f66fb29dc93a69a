// References to versions of a model: `name`, `name@alias`, `name:3`. Pure.
import type { Model, ModelVersion, ServedBy } from "../../api/types";

type Named = Pick<Model, "name" | "latest" | "aliases">;

/** The reference by which to serve a version: by an alias if it has one, `production` first. */
export function referenceTo(model: Named, { aliases, version }: Pick<ModelVersion, "aliases" | "version">): string {
  const alias = aliases.includes("production") ? "production" : aliases[0];
  if (alias) return `${model.name}@${alias}`;
  return version === model.latest ? model.name : `${model.name}:${version}`;
}

/** The number of the version that a serve job answers with, or will once it runs; null: there is none. */
export function servedVersion(model: Named, { reference, version }: Pick<ServedBy, "reference" | "version">): number | null {
  if (version !== null) return version;
  const [, mark, name] = /([@:])(.*)$/.exec(reference) ?? [];
  if (mark === ":") return Number(name);
  return mark === undefined || name === "latest" ? model.latest : (model.aliases[name!] ?? null);
}
