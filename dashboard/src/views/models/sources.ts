// The rows that a model can be tried on and evaluated with. Pure.

export interface SourceSpec { dataset: string; split: string; fraction?: [number, number] | null }
export interface DataSpec { train?: SourceSpec; validation?: SourceSpec | Record<string, SourceSpec> | null }

/** The validation sources of a training job. */
export function validationSources({ validation }: DataSpec): SourceSpec[] {
  if (!validation) return [];
  const isOne = typeof (validation as SourceSpec).dataset === "string";
  return isOne ? [validation as SourceSpec] : Object.values(validation as Record<string, SourceSpec>);
}

/** The sources to evaluate with: those of validation, then the other splits of the training dataset, its own last. */
export function evaluationSources(data: DataSpec, splits: readonly string[]): SourceSpec[] {
  const train = data.train;
  const others = train ? splits.map((split) => ({ dataset: train.dataset, split })) : [];
  const isTrain = (one: SourceSpec) => one.dataset === train?.dataset && one.split === train.split && !one.fraction;
  const all = [...validationSources(data), ...others.filter((one) => !isTrain(one)), ...others.filter(isTrain)];
  return all.filter((one, place) => all.findIndex((other) => textOf(other) === textOf(one)) === place);
}

export function textOf({ dataset, split, fraction }: SourceSpec): string {
  return `${dataset} ${split} ${isPart(fraction) ? fraction.join(" ") : ""}`;
}

/** "test", or "all, rows 0.8 to 1 of the shuffled split" */
export function nameOf({ split, fraction }: SourceSpec): string {
  return isPart(fraction) ? `${split} (fraction ${fraction[0]} to ${fraction[1]})` : split;
}

function isPart(fraction: SourceSpec["fraction"]): fraction is [number, number] {
  return !!fraction && !(fraction[0] === 0 && fraction[1] === 1);
}
