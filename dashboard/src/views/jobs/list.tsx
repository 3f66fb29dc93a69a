import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>jobs/list</p></Empty>;
}
