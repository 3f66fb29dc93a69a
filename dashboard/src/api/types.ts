// The types of responses, generated from openapi.json (npm run types).
import type { components } from "./schema.gen";

type Schemas = components["schemas"];
export type Job = Schemas["Job"];
export type JobState = Job["state"];
export type Number = number | "NaN" | "Infinity" | "-Infinity";

export interface Page<T> {
  object: "list";
  data: T[];
  has_more: boolean;
  next: string | null;
}

/** A number of the API: JSON has no NaN, so the API returns "NaN". */
export function num(value: Number | null | undefined): number | null {
  return value === null || value === undefined ? null : +value;
}

export const ENDED: readonly JobState[] = ["succeeded", "failed", "cancelled"];

export function ended(job: Job): boolean {
  return ENDED.includes(job.state);
}
export type Plan = Schemas["Plan"];
export type Dataset = Schemas["Dataset"];
export type DatasetStats = Schemas["DatasetStats"];
export type Rows = Schemas["Rows"];
export type Device = Schemas["Device"];
export type Worker = Schemas["Worker"];
export type QueuedJob = Schemas["QueuedJob"];
export type Key = Schemas["Key"];
export type NewKey = Schemas["NewKey"];
export type Quotas = Schemas["Quotas"];
export type Webhook = Schemas["Webhook"];
export type NewWebhook = Schemas["NewWebhook"];
export type Delivery = Schemas["Delivery"];
export type Checkpoint = Schemas["Checkpoint"];
export type Command = Schemas["Command"];
export type Layer = Schemas["Layer"];
export type Figures = Schemas["Figures"];
export type Service = Schemas["Service"];
export type Model = Schemas["Model"];
export type ModelSummary = Schemas["ModelSummary"];
export type ModelVersion = Schemas["ModelVersion"];
export type ServedBy = Schemas["ServedBy"];
export type CheckpointNetwork = Schemas["CheckpointNetwork"];
export type Prediction = Schemas["Prediction"];
