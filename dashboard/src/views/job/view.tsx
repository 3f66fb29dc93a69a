// The view of a job: its header, actions and tabs.
import { useLocation, useRoute } from "preact-iso";
import { useEffect } from "preact/hooks";

import { useLive } from "../../api/live";
import { ended, type Job } from "../../api/types";
import { part } from "../../ui/part";
import { Empty, Loading, ProblemBox } from "../../ui/state";
import { Checkpoints } from "./checkpoints";
import { Diagnosis } from "./diagnosis";
import { Evaluation } from "./evaluation";
import { Events } from "./logs/events";
import { Header } from "./header";
import { Logs } from "./logs/logs";
import { Overview } from "./overview";
import { Predictions } from "./predictions/predictions";
import { Serving } from "./serving/serving";
import { SpecTab } from "./spec/spec";

const Inside = part(() => import("../inside/panel").then((it) => it.Inside));

export default function View() {
  const { id = "", tab = "overview" } = useRoute().params;
  const live = useLive<Job>(`jobs/${id}`, 1);
  const job = live.value;
  useTitle(job);
  if (!job) return live.problem ? <Missing problem={live.problem} /> : <Loading what="Loading the job" />;
  return (
    <div class="stack">
      <Header job={job} />
      <Tabs job={job} tab={tab} />
      <Tab job={job} tab={tab} />
    </div>
  );
}

function Missing({ problem }: { problem: NonNullable<ReturnType<typeof useLive>["problem"]> }) {
  return <div class="stack"><ProblemBox problem={problem} /><a href="/jobs">Back to jobs</a></div>;
}

function useTitle(job: Job | null): void {
  useEffect(() => {
    if (!job) return;
    document.title = `${ended(job) || job.state !== "running" ? `${job.state}: ` : ""}${job.name ?? job.id} · Glasshouse`;
    return () => void (document.title = "Glasshouse");
  }, [job?.name, job?.state, job?.id]);
}

const NAMES: Record<string, string> = { overview: "Overview", inside: "Inside", logs: "Logs", events: "Events", checkpoints: "Checkpoints", predictions: "Predictions", spec: "Spec" };
const OF_KIND: Record<Job["kind"], readonly string[]> = { train: ["inside", "checkpoints"], infer: ["predictions"], evaluate: [], serve: [], diagnose: [] };
const OF_SOME = Object.values(OF_KIND).flat();

function Tabs({ job, tab }: { job: Job; tab: string }) {
  const { path } = useLocation();
  const shown = Object.keys(NAMES).filter((key) => !OF_SOME.includes(key) || OF_KIND[job.kind].includes(key));
  return (
    <nav class="tabs" aria-label="Job views" data-path={path}>
      {shown.map((key) => <a key={key} href={key === "overview" ? `/jobs/${job.id}` : `/jobs/${job.id}/${key}`} aria-current={key === tab ? "page" : undefined}>{NAMES[key]}</a>)}
    </nav>
  );
}

function First({ job }: { job: Job }) {
  if (job.kind === "diagnose") return <Diagnosis job={job} />;
  if (job.kind === "evaluate") return <Evaluation job={job} />;
  if (job.kind === "serve") return <Serving job={job} />;
  return job.kind === "infer" && !job.error ? <Predictions job={job} /> : <Overview job={job} />;
}

function Tab({ job, tab }: { job: Job; tab: string }) {
  switch (tab) {
    case "overview": return <First job={job} />;
    case "inside": return <Inside job={job} />;
    case "logs": return <Logs job={job} />;
    case "events": return <Events job={job} />;
    case "checkpoints": return <Checkpoints job={job} />;
    case "predictions": return <Predictions job={job} />;
    case "spec": return <SpecTab job={job} />;
    default: return <Empty><p>This tab does not exist.</p><a class="button" href={`/jobs/${job.id}`}>Open the overview</a></Empty>;
  }
}
