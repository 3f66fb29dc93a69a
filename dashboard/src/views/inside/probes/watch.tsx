// Which probe would record this, and a button that attaches it.
import { useState } from "preact/hooks";

import { post } from "../../../api/http";
import { refresh, useLive } from "../../../api/live";
import { ended, type Job, type Page } from "../../../api/types";
import { bytes } from "../../../format";
import { Empty } from "../../../ui/state";
import { notify } from "../../../ui/toast";
import { kindName } from "../kinds";
import { cost, type Probe, recordsRank } from "./probe";

interface Props { job: Job; tensor: string; kind: string; want: string; every: number; rank: number | null; what: string }

export function WatchThis({ job, tensor, kind, want, every, rank, what }: Props) {
  const [sending, setSending] = useState(false);
  const { value } = useLive<Page<Probe>>(ended(job) ? null : `jobs/${job.id}/probes`, 2);
  const own = rank === null ? {} : { ranks: [rank] };
  const body = { layers: [tensor], kinds: [kind], every, ...own, want: want === "full" ? [want] : ["stats", want].filter((one, n, all) => all.indexOf(one) === n) };
  const waiting = value?.data.find((probe) => probe.matched.includes(tensor) && probe.kinds.some((one) => one === kind) && probe.want.some((one) => one === want) && (rank === null || recordsRank(probe, rank)));
  const attach = async () => {
    setSending(true);
    const made = await notify(post<Probe>(`jobs/${job.id}/probes`, body));
    if (made) await notify(Promise.resolve(), `Probe attached: ${bytes(made.bytes_per_step)} and about ${cost(made.estimated_cost_s ?? 0)} per sample. Detach it under Probes.`);
    refresh(`jobs/${job.id}/probes`);
    setSending(false);
  };
  return (
    <Empty>
      <p>{what} for <b>{kindName(kind)}</b> of <code>{tensor}</code>{rank !== null && ` of rank ${rank}`}. A probe with <code>{want}</code>{rank !== null && <> and <code>ranks</code></>} records them.</p>
      {ended(job) ? <p>The job has ended. For the next job, add this to <code>probes</code> in its spec: <code>{JSON.stringify(body)}</code></p>
        : waiting ? <p role="status">A probe records them ({waiting.state}{waiting.applied_step === null ? "" : `, from step ${waiting.applied_step}`}). The first sample comes with the next step that is due. <a href={`/jobs/${job.id}/inside?view=probes`}>Probes</a></p>
        : <p class="row" style={{ justifyContent: "center" }}>
            <button class="primary" onClick={attach} disabled={sending}>{every === 1 ? "Watch every step" : `Watch every ${every} steps`}</button>
            <a class="button" href={`/jobs/${job.id}/inside?view=probes&watch=${encodeURIComponent(tensor)}&kinds=${kind}${rank === null ? "" : `&ranks=${rank}`}`}>Options …</a>
          </p>}
    </Empty>
  );
}
