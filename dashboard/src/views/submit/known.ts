// The sources of the form: the schema of a spec, and the catalog of layers, losses, optimizers …
import { get } from "../../api/http";
import type { JsonObject } from "../../spec/pointer";
import { type Definitions, type Field, fieldOf, type Property } from "../../spec/schema";
import type { PresetEntry } from "../../spec/suggest";

export interface Entry { name: string; summary: string; schema: JsonObject; outputs?: string[] | null }
type Section = "layers" | "presets" | "losses" | "optimizers" | "schedulers" | "metrics";
const SECTIONS: readonly Section[] = ["layers", "presets", "losses", "optimizers", "schedulers", "metrics"];

/** By schema title: the catalog section with the arguments, and the property that names the entry. */
const ARGUMENTS: Record<string, readonly [section: Section, name: string]> = {
  Layer: ["layers", "type"],
  Preset: ["presets", "preset"],
  Loss: ["losses", "type"],
  Optimizer: ["optimizers", "type"],
  SparseOptimizer: ["optimizers", "type"],
  Scheduler: ["schedulers", "type"],
  Metric: ["metrics", "type"],
};
const FEW = 40; // up to this many are a select; more are completed while typing

export class Known {
  private readonly fields = new Map<string, Field>();

  constructor(private readonly definitions: Definitions, readonly catalog: Record<Section, Entry[]>) {}

  get presets(): PresetEntry[] {
    return this.catalog.presets;
  }

  /** The field of a definition, cached. */
  field(name: string): Field {
    let field = this.fields.get(name);
    if (!field) this.fields.set(name, (field = fieldOf(this.definitions[name] ?? {}, this.definitions)));
    return field;
  }

  /** The arguments of a catalog entry; null if there is no such entry. */
  argumentsOf(section: Section, name: unknown): Field | null {
    const entry = this.catalog[section].find((one) => one.name === name);
    if (!entry) return null;
    const key = `${section} ${entry.name}`;
    let field = this.fields.get(key);
    if (!field) {
      const { title: _, ...schema } = entry.schema;
      const definitions = (entry.schema["$defs"] ?? {}) as Definitions;
      this.fields.set(key, (field = { ...fieldOf({ ...schema, description: entry.summary }, definitions), title: "Arguments" }));
    }
    return field;
  }

  property(owner: Field, property: Property, value: JsonObject): Property & { list?: string | undefined } {
    const known = ARGUMENTS[owner.title];
    if (!known) return owner.title === "Source" ? sourceProperty(property) : property;
    const [section, naming] = known;
    if (property.name === "args") {
      const field = this.argumentsOf(section, value[naming]);
      return field ? { ...property, field, required: true } : property;
    }
    if (property.name === naming) return this.naming(section, property);
    return property.name === "inputs" ? { ...property, list: "names" } : property;
  }

  private naming(section: Section, property: Property): Property & { list?: string } {
    const names = this.catalog[section].map((one) => one.name);
    if (names.length > FEW) return { ...property, list: section };
    if (property.field.kind === "choice") return property;
    return { ...property, field: { ...property.field, kind: "choice", options: names } as Field };
  }
}

function sourceProperty(property: Property): Property & { list?: string } {
  const list = { dataset: "datasets", split: "splits" }[property.name];
  return list ? { ...property, list } : property;
}

let loading: Promise<Known> | null = null;

/** Requested once per page load. */
export function known(): Promise<Known> {
  loading ??= load().catch((error: unknown) => {
    loading = null;
    throw error;
  });
  return loading;
}

async function load(): Promise<Known> {
  const [schema, ...sections] = await Promise.all([
    get<{ components: { schemas: Definitions } }>("/openapi.json"),
    ...SECTIONS.map((section) => get<{ entries: Entry[] }>(`catalog/${section}`)),
  ]);
  const catalog = Object.fromEntries(SECTIONS.map((section, at) => [section, sections[at]!.entries]));
  return new Known(schema.components.schemas, catalog as Record<Section, Entry[]>);
}
