import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>inside/layer</p></Empty>;
}
