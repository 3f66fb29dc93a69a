import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>devices/view</p></Empty>;
}
