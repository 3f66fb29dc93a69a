// The plan beside the form: what is wrong, else what the job would do.
import type { FieldProblem } from "../../api/http";
import type { Plan } from "../../api/types";
import { bytes, count } from "../../format";
import { ProblemBox } from "../../ui/state";
import { LayerTable } from "./layer_table";
import type { Planned } from "./planning";

/** The heads of the memory in the order of their lives, in words. */
const HEADS: readonly [string, string][] = [
  ["parameters_bytes", "parameters"],
  ["gradients_bytes", "gradients"],
  ["optimizer_state_bytes", "optimizer"],
  ["averages_bytes", "averages"],
  ["activations_bytes", "activations"],
  ["data_bytes", "data"],
  ["checkpoint_bytes", "checkpoint"],
];

export function PlanPane({ planned, jump }: { planned: Planned; jump(pointer: string): void }) {
  const { plan, problems, problem, isOld } = planned;
  return (
    <section class="card stack" aria-label="Plan">
      <div class="spread">
        <h2>Plan</h2>
        <span class="muted" role="status">{isOld ? (problems.length || problem ? "" : "asking …") : "as written"}</span>
      </div>
      {problem && <ProblemBox problem={problem} />}
      {problems.length > 0 && <Wrong problems={problems} jump={jump} />}
      {plan && <div class={isOld ? "stack old" : "stack"}>{isOld && problems.length > 0 && <p class="muted">As it was before:</p>}<Facts plan={plan} jump={jump} /></div>}
    </section>
  );
}

function Wrong({ problems, jump }: { problems: readonly FieldProblem[]; jump(pointer: string): void }) {
  return (
    <div class="problem" role="alert">
      <p><strong>{problems.length === 1 ? "One thing is to be changed" : `${problems.length} things are to be changed`}</strong></p>
      <ul>{problems.map((one) => <Told key={one.pointer + one.detail} {...one} jump={jump} />)}</ul>
    </div>
  );
}

function Told({ pointer, detail, jump }: { pointer: string; detail: string; jump(pointer: string): void }) {
  return <li><button type="button" class="jump" onClick={() => jump(pointer)}>{pointer || "/"}</button> {detail}</li>;
}

function Facts({ plan, jump }: { plan: Plan; jump(pointer: string): void }) {
  const free = plan.devices.filter((one) => one.free).length;
  return (
    <>
      {plan.warnings.length > 0 && (
        <div class="note"><strong>Perhaps not meant</strong><ul>{plan.warnings.map((one) => <Told key={one.pointer + one.detail} {...one} jump={jump} />)}</ul></div>
      )}
      <dl class="facts">
        <dt>Parameters</dt><dd data-plan="parameters">{count(plan.parameters)}</dd>
        <dt>FLOPs of a step</dt><dd data-plan="flops">{plan.flops === null ? "not known" : count(plan.flops)}</dd>
        <dt>Steps</dt><dd data-plan="steps">{plan.num_steps === null ? "until its time is over" : count(plan.num_steps)}</dd>
        <dt>Devices</dt><dd>{plan.devices.length ? `${free} of ${plan.devices.length} that it may get ${free === 1 ? "is" : "are"} free: ${names(plan)}` : "none is there yet"}</dd>
        {watched(plan) > 0 && <><dt>Watched</dt><dd>{bytes(watched(plan))} at a step that is looked at</dd></>}
      </dl>
      <h3>Memory</h3>
      <Memory memory={plan.memory} />
      {plan.layers.length > 0 && <><h3>Layers</h3><LayerTable plan={plan} /></>}
    </>
  );
}

function names(plan: Plan): string {
  const all = plan.devices.map((one) => `${one.id} of ${one.worker}`);
  return all.slice(0, 4).join(", ") + (all.length > 4 ? " …" : "");
}

const watched = (plan: Plan) => plan.probes.reduce((sum, one) => sum + Number(one["bytes_per_step"] ?? 0), 0);

function Memory({ memory }: { memory: Record<string, number> }) {
  const most = Math.max(1, ...HEADS.map(([head]) => memory[head] ?? 0));
  return (
    <div class="level">
      {HEADS.filter(([head]) => memory[head]).map(([head, word]) => (
        <>
          <span>{word}</span>
          <i aria-hidden="true" style={{ width: `${(100 * memory[head]!) / most}%` }} />
          <span class="number" data-plan={head}>{bytes(memory[head])}</span>
        </>
      ))}
      <strong>together</strong><span /><strong class="number" data-plan="total_bytes">{bytes(memory["total_bytes"])}</strong>
    </div>
  );
}
