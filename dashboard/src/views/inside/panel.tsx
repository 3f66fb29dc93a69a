import type { Job } from "../../api/types";

export const Inside = ({ job }: { job: Job }) => <p class="muted">{job.id}</p>;
