import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>settings/view</p></Empty>;
}
