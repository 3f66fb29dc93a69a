// The process of a job with several whose own values are shown, instead of those of all together.
import type { Job } from "../../api/types";
import { useQuery } from "../../query";

/** The rank in the address; null: all processes together. */
export function useRank(job: Job): number | null {
  const [query] = useQuery();
  const asked = query.get("rank");
  return job.ranks.length > 1 ? job.ranks.find((one) => String(one.rank) === asked)?.rank ?? null : null;
}

export function RankChoice({ job }: { job: Job }) {
  const [, change] = useQuery();
  const rank = useRank(job);
  if (job.ranks.length < 2) return null;
  return (
    <label class="row"><span class="muted">Process</span>
      <select name="rank" value={rank === null ? "" : String(rank)} onChange={(event) => change({ rank: event.currentTarget.value || null })}>
        <option value="">all, merged</option>
        {job.ranks.map((one) => <option key={one.rank} value={one.rank}>rank {one.rank}</option>)}
      </select>
    </label>
  );
}
