import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>job/view</p></Empty>;
}
