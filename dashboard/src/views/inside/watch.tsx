// What must be watched to see this, and a button that does it.
import { useState } from "preact/hooks";

import { post } from "../../api/http";
import { refresh, useLive } from "../../api/live";
import { ended, type Job, type Page } from "../../api/types";
import { bytes } from "../../format";
import { Empty } from "../../ui/state";
import { tell } from "../../ui/toast";
import { cost, type Probe } from "./probe";

interface Props { job: Job; tensor: string; kind: string; want: string; every: number; what: string }

export function WatchThis({ job, tensor, kind, want, every, what }: Props) {
  const [sending, setSending] = useState(false);
  const { value } = useLive<Page<Probe>>(ended(job) ? null : `jobs/${job.id}/probes`, 2);
  const body = { layers: [tensor], kinds: [kind], every, want: want === "full" ? [want] : ["stats", want].filter((one, n, all) => all.indexOf(one) === n) };
  const waiting = value?.data.find((probe) => probe.matched.includes(tensor) && probe.kinds.some((one) => one === kind) && probe.want.some((one) => one === want));
  const attach = async () => {
    setSending(true);
    const made = await tell(post<Probe>(`jobs/${job.id}/probes`, body));
    if (made) await tell(Promise.resolve(), `Attached: ${bytes(made.bytes_per_step)} a look, about ${cost(made.estimated_cost_s ?? 0)}. Detach it under Probes.`);
    refresh(`jobs/${job.id}/probes`);
    setSending(false);
  };
  return (
    <Empty>
      <p>{what} <code>{kind}</code> of <code>{tensor}</code>: to see it, a probe with <code>{want}</code> must watch it.</p>
      {ended(job) ? <p>The job has ended. This in the <code>probes</code> of a job's spec shows it: <code>{JSON.stringify(body)}</code></p>
        : waiting ? <p role="status">A probe looks at it ({waiting.state}{waiting.applied_step === null ? "" : `, from step ${waiting.applied_step}`}): the first value comes with its next due step. <a href={`/jobs/${job.id}/inside?view=probes`}>Probes</a></p>
        : <p class="row" style={{ justifyContent: "center" }}>
            <button class="primary" onClick={attach} disabled={sending}>Watch it every {every} steps</button>
            <a class="button" href={`/jobs/${job.id}/inside?view=probes&watch=${encodeURIComponent(tensor)}&kinds=${kind}`}>With choices</a>
          </p>}
    </Empty>
  );
}
