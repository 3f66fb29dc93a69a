import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>submit/view</p></Empty>;
}
