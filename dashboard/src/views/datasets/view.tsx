import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>datasets/view</p></Empty>;
}
